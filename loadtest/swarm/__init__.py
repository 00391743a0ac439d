"""The load itself: Locust users, one class a door, that play the legs of a plan."""
