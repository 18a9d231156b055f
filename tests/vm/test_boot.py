"""The machine itself: a kernel of its own, GRUB's own choice, real reboots, and systemd's address filters."""

from __future__ import annotations

import os

import pytest

from tests.lab import vm_image
from tests.vm.conftest import Bench


def test_it_runs_a_kernel_of_its_own_that_grub_has_started(bench: Bench) -> None:
    kernel, images = bench.kernel, bench.images
    print(f"{bench.vm.record['accelerator']}: kernel {kernel} of {images}, boot id {bench.boot_id}")
    assert kernel in images
    assert kernel != os.uname().release
    assert "BOOT_IMAGE=" in bench.sh("cat /proc/cmdline")
    assert "GRUB" in bench.sh("head -c 440 /dev/vda | tr -cd '[:print:]'")
    assert "menuentry 'Debian GNU/Linux'" in bench.sh("cat /boot/grub/grub.cfg")
    assert "GRUB Environment Block" in bench.sh("head -1 /boot/grub/grubenv")


def test_no_unit_has_failed(bench: Bench) -> None:
    assert not bench.sh("systemctl list-units --failed --plain --no-legend")


#: Connects to its first argument, an address and a port.
CONNECT = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"


def connects(bench: Bench, address: str, port: int, *properties: str) -> bool:
    options = " ".join(f"-p {word}" for word in properties)
    return bench.succeeds(f"systemd-run --quiet --wait --pipe {options} python3 -c '{CONNECT}' {address} {port}")


def test_systemd_filters_what_a_unit_connects_to(bench: Bench) -> None:
    url = bench.vm.serve(bench.folder)
    port = int(url.rpartition(":")[2])
    assert connects(bench, vm_image.HOST, port)
    assert not connects(bench, vm_image.HOST, port, "IPAddressDeny=any")
    assert connects(bench, vm_image.HOST, port, "IPAddressDeny=any", f"IPAddressAllow={vm_image.HOST}/32")
    assert not connects(bench, vm_image.HOST, port, "IPAddressDeny=any", "IPAddressAllow=localhost")


@pytest.fixture
def listener(bench: Bench) -> str:
    """A unit that listens on all addresses and lets only the loopback in."""
    filters = "-p IPAddressDeny=any -p IPAddressAllow=localhost"
    bench.sh(f"systemd-run --quiet --unit=listener {filters} python3 -m http.server 8099")
    bench.sh("for i in $(seq 100); do ss -ltn | grep -q :8099 && exit; sleep 0.2; done; exit 1")
    return "listener"


def test_systemd_filters_who_connects_to_a_unit(bench: Bench, listener: str) -> None:
    try:
        assert connects(bench, "127.0.0.1", 8099)
        assert not connects(bench, "10.0.2.15", 8099)
    finally:
        bench.sh(f"systemctl stop {listener}")
