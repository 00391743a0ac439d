"""From a load test's records to its figures, verdict, table and report."""
