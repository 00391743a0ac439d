"""Who may call the gateway: keys that are kept as hashes, and the tenants that they make."""

import hashlib
import os

import pytest
from deepseek_flash.config import ConfigError, GatewayConfig
from deepseek_flash.gateway import keys
from deepseek_flash.gateway.keys import ANYONE, Keyring, Tenant, hashed, listen_address

A, B = hashed("a", "key-a"), hashed("b", "key-b")


def test_keys_of_the_environment_and_of_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{B}\n")
    ring = Keyring.of(GatewayConfig(gateway_keys=A, gateway_keys_file=str(file)))
    assert ring.required
    assert [ring.tenant([key]).name for key in ("key-a", "key-b")] == ["a", "b"]
    assert ring.tenant(["key-c"]) is None and ring.tenant([]) is None and ring.tenant([""]) is None
    assert ring.tenant(["key-c", "key-b"]).name == "b"  # one of several headers is enough


def test_without_keys_everybody_is_the_same_tenant():
    ring = Keyring.of(GatewayConfig())
    assert not ring.required and ANYONE.salt("x") == "x" and ANYONE.salt("") == ""


def test_neither_key_nor_salt_can_be_told_from_what_is_kept(tmp_path):
    ring = Keyring(A)
    kept = repr(vars(ring))
    tenant = ring.tenant(["key-a"])
    assert "key-a" not in kept and tenant.secret.hex() not in kept
    known = {hashlib.sha256(b"key-a").hexdigest(), hashlib.sha256(b"a").hexdigest()}
    assert tenant.salt("") not in known


def test_salts_split_and_never_meet():
    tenants = [Tenant("a", b"1"), Tenant("a", b"2")]
    salts = {tenant.salt(own) for tenant in tenants for own in ("", "x", "y", "é")}
    assert len(salts) == 8 and all(len(salt) == 64 for salt in salts)
    assert Tenant("other name", b"1").salt("x") == tenants[0].salt("x")  # a key's name is no secret


def test_a_revoked_key_is_out_at_once(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{A}\n{B}\n")
    ring = Keyring(file=file)
    assert ring.tenant(["key-b"]).name == "b"
    file.write_text(f"{A}\n")
    os.utime(file, ns=(1, 1))
    assert ring.tenant(["key-b"]) is None and ring.tenant(["key-a"]).name == "a"
    file.unlink()
    assert ring.required and ring.tenant(["key-a"]) is None


def test_a_mistake_made_later_spoils_nothing_but_its_line(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text(f"{A}\n{B}\n")
    ring = Keyring(file=file)
    file.write_bytes(f"{A}\nkey-c\n".encode() + b"\xff\n")
    os.utime(file, ns=(1, 1))
    for _ in range(2):
        assert ring.tenant(["key-b"]) is None and ring.tenant(["key-a"]).name == "a"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "entry 2" in told[0] and "entry 3" in told[1]
    assert "key-c" not in "".join(told)


def test_a_name_may_have_two_keys_while_it_changes(tmp_path):
    ring = Keyring(",".join([A, hashed("a", "key-new")]))
    old, new = (ring.tenant([key]) for key in ("key-a", "key-new"))
    assert old.name == new.name == "a" and old.salt("") != new.salt("")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "a:key-a\n", "key-a", "a:" + "0" * 63, "a b:x"]
)
def test_a_malformed_file_stops_the_start_without_telling_it(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="gateway_keys_file") as caught:
        Keyring(file=file)
    assert "key-a" not in str(caught.value)


def test_no_file_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match="gateway_keys_file"):
        Keyring(file=tmp_path / "none")


@pytest.mark.parametrize("text", ["key-a", "a:b", A + ",x", "a:" + "G" * 64])
def test_malformed_keys_in_the_environment(text):
    with pytest.raises(ConfigError, match="gateway_keys") as caught:
        Keyring(text)
    assert "key-a" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "required", "listens"),
    [
        ("0.0.0.0", True, "0.0.0.0"), ("0.0.0.0", False, "127.0.0.1"),
        ("10.0.0.1", False, "127.0.0.1"), ("127.0.0.1", False, "127.0.0.1"),
        ("::1", False, "::1"), ("localhost", False, "localhost"), ("", False, "127.0.0.1"),
    ],
)  # fmt: skip
def test_without_keys_it_listens_on_this_machine_only(host, required, listens):
    assert listen_address(host, Keyring(A if required else "")) == listens


def test_the_tool_makes_a_key_and_its_line(capsys):
    assert keys.main(["alice"]) == 0
    key, line = (text.rsplit(": ")[1] for text in capsys.readouterr().out.splitlines())
    assert key.startswith("sk-") and line == hashed("alice", key)
    assert Keyring(line).tenant([key]).name == "alice"
    assert keys.main(["a:b"]) == 1 and "sk-" not in capsys.readouterr().out
