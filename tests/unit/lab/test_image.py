# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What goes into the base image, and the name that follows from it."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from pathlib import Path

import pytest

from tests.lab import image
from tests.lab.errors import LabError

FIXTURES = Path(__file__).parents[1] / "fixtures/lab"
RECIPE = image.Recipe(
    suite="bookworm", base=None, sources=("deb http://a/debian bookworm main",), files={"/etc/x": "1"}
)


def test_the_name_follows_the_content() -> None:
    assert RECIPE.tag.startswith("localhost/volta-lab:bookworm-")
    assert dataclasses.replace(RECIPE).tag == RECIPE.tag
    for change in ({"files": {"/etc/x": "2"}}, {"sources": ()}, {"base": "ubuntu:22.04"}):
        assert dataclasses.replace(RECIPE, **change).digest != RECIPE.digest


def test_a_registry_name_becomes_a_tag() -> None:
    tag = dataclasses.replace(RECIPE, base="docker.io/library/Ubuntu:22.04").tag

    assert tag.startswith("localhost/volta-lab:docker-io-library-ubuntu-22-04-")


def test_unknown_suite() -> None:
    with pytest.raises(LabError, match="bookworm, trixie"):
        image.recipe("jammy", None)


@pytest.mark.parametrize(
    ("text", "mirrors"),
    [
        ("", ("http://deb.debian.org/debian", "http://deb.debian.org/debian-security")),
        (
            "Types: deb\nURIs: https://mirror.example/debian/\nSuites: bookworm\n",
            ("https://mirror.example/debian", "http://deb.debian.org/debian-security"),
        ),
        (
            "deb [arch=amd64] http://m.example/debian bookworm main\n"
            "# deb http://old.example/debian bookworm main\n"
            "deb http://m.example/debian-security bookworm-security main\n",
            ("http://m.example/debian", "http://m.example/debian-security"),
        ),
        # Another distribution's archive, one with a password, and one on the host's own disk.
        (
            "deb http://archive.ubuntu.com/ubuntu jammy main\ndeb https://u:p@m.example/debian bookworm main\n"
            "deb file:///srv/debian bookworm main\n",
            ("http://deb.debian.org/debian", "http://deb.debian.org/debian-security"),
        ),
    ],
)
def test_mirrors_of_this_host(text: str, mirrors: tuple[str, str]) -> None:
    assert image.debian_mirrors(text) == mirrors


def test_sources() -> None:
    assert image.debian_sources("trixie", ("http://a/debian", "http://s/debian-security")) == (
        "deb http://a/debian trixie main",
        "deb http://a/debian trixie-updates main",
        "deb http://s/debian-security trixie-security main",
    )


def test_apt_settings_of_this_host() -> None:
    dump = (FIXTURES / "apt-config-dump.txt").read_text()
    proxies = 'Acquire::http::Proxy "http://proxy.example:3128";\nAcquire::https::Proxy "http://127.0.0.1:3128";\n'

    assert image.apt_settings(dump + proxies) == (
        'Acquire::Check-Valid-Until "false";\n'
        'Acquire::Check-Date "false";\n'
        'Acquire::http::Proxy "http://proxy.example:3128";\n'
    )


def test_proxies_of_this_host() -> None:
    text = image.proxy_environment(
        {"HTTPS_PROXY": "http://proxy.example:3128", "http_proxy": "http://localhost:3128", "no_proxy": "example.org"},
        "10.213.0.0/16",
    )

    assert 'https_proxy="http://proxy.example:3128"' in text
    assert 'HTTPS_PROXY="http://proxy.example:3128"' in text
    assert "localhost" not in text
    assert 'no_proxy="example.org,10.213.0.0/16"' in text


def test_no_proxy_no_file() -> None:
    assert image.proxy_environment({"PATH": "/bin"}, "10.213.0.0/16") == ""


def test_tar() -> None:
    data = image.tar_of({"/etc/key": "k\n"}, {"/etc/key": 0o600}, {"/usr/bin/x": "/opt/x"})

    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        key, link = archive.getmembers()
    assert (key.name, key.mode, key.size, key.uid) == ("etc/key", 0o600, 2, 0)
    assert (link.name, link.linkname) == ("usr/bin/x", "/opt/x")


def test_machine_ids() -> None:
    assert image.machine_id("demo-1") == image.machine_id("demo-1")
    assert image.machine_id("demo-1") != image.machine_id("demo-2")
    assert len(image.machine_id("demo-1").strip()) == 32
