"""Prints the settings in force on a server: ``python -m clients.settings``."""

from __future__ import annotations

import argparse
import sys

import httpx
from prometheus_client.parser import text_string_to_metric_families

METRIC = "deepseek_flash_config_info"


def read_settings(url: str) -> dict[str, dict[str, str]]:
    """Model → key → value, from the metrics endpoint of a server.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    response = httpx.get(f"{url.rstrip('/')}/metrics", timeout=10, trust_env=False)
    response.raise_for_status()
    settings: dict[str, dict[str, str]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if sample.name == METRIC:
                labels = sample.labels
                settings.setdefault(labels["model"], {})[labels["key"]] = labels["value"]
    return settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8002")
    try:
        settings = read_settings(parser.parse_args().url)
    except httpx.HTTPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for model, values in sorted(settings.items()):
        print(model)
        for key, value in sorted(values.items()):
            print(f"  {key} = {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
