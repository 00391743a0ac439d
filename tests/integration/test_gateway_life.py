"""Gateway and Triton live and end together."""

import contextlib

import httpx
import psutil

from loadtest.served import free_ports, start, stop, wait_ready
from tests.integration.conftest import MODEL
from tests.integration.raw import wait_for


def test_both_start_and_both_stop():
    (port,) = free_ports(1)
    # All addresses are asked for, but there is no key.
    served = start(MODEL, ["--host", "0.0.0.0", "--gateway-port", str(port)], ready=False)
    try:
        wait_ready(served)
        output = served.output.read_text()
        assert f"http://127.0.0.1:{port}/v1" in output and "this machine only" in output
        listening = {
            connection.laddr.ip
            for child in psutil.Process(served.process.pid).children(recursive=True)
            for connection in child.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }
        assert listening == {"127.0.0.1"}
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        children = psutil.Process(served.process.pid).children(recursive=True)
    finally:
        assert stop(served) < 20
    assert not [child for child in children if child.is_running()]


def test_a_mistake_in_its_settings_is_told_before_anything_starts():
    (port,) = free_ports(1)
    flags = ["--gateway-port", str(port), "--gateway-keys", "not-a-hash"]
    served = start(MODEL, flags, ready=False)
    assert served.process.wait(30) == 1
    assert "gateway_keys: entry 1" in served.output.read_text()


def test_a_lost_gateway_comes_back(gateway):
    def gateways():
        found = []
        for child in psutil.Process(gateway.served.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, or gone
                if "deepseek_flash.gateway.server" in child.cmdline():
                    found.append(child)
        return found

    (process,) = gateways()
    process.kill()
    wait_for(lambda: [p for p in gateways() if p.pid != process.pid], 60, "another gateway")

    def healthy():
        try:
            return httpx.get(gateway.url + "/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    wait_for(healthy, 60, "it serves")
