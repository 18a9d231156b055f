# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How the stand-in reads and writes what Ollama's Go code reads and writes."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.lab.ollama import standin as program


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", "127.0.0.1", 11434),
        ("0.0.0.0", "0.0.0.0", 11434),
        ("10.0.0.5:8080", "10.0.0.5", 8080),
        (":8080", "", 8080),
        ("1.2.3.4:", "1.2.3.4", 11434),
        ("1.2.3.4:99999", "1.2.3.4", 11434),
        ("http://1.2.3.4", "1.2.3.4", 80),
        ("https://box.local", "box.local", 443),
        ("http://1.2.3.4:5678/path", "1.2.3.4", 5678),
        ("[::1]", "::1", 11434),
        ("[::]:8080", "::", 8080),
        ("::1", "::1", 11434),
        (' "10.0.0.5" ', "10.0.0.5", 11434),
    ],
)
def test_ollama_host(monkeypatch: pytest.MonkeyPatch, text: str, host: str, port: int) -> None:
    monkeypatch.setenv("OLLAMA_HOST", text)
    assert program.host_and_port() == (host, port)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("-1s", -1), ("0", 0), ("250ms", 0.25)]
)
def test_durations(text: str, seconds: float) -> None:
    assert program.parse_duration(text) == seconds * 1e9


@pytest.mark.parametrize("text", ["", "5", "m", "5x", "5m ", "1h-5m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(program.DurationError, match="duration"):
        program.parse_duration(text)


@pytest.mark.parametrize(
    ("keep_alive", "load_timeout", "kept", "limit"),
    [
        ("", "", 300, 300),
        ("-1", "0", program.FOREVER / 1e9, program.FOREVER / 1e9),
        ("90", "10m", 90, 600),
        ("soon", "-5m", 300, program.FOREVER / 1e9),
        ("0", "45", 0, 45),
    ],
)
def test_times_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, keep_alive: str, load_timeout: str, kept: float, limit: float
) -> None:
    monkeypatch.setenv("OLLAMA_KEEP_ALIVE", keep_alive)
    monkeypatch.setenv("OLLAMA_LOAD_TIMEOUT", load_timeout)
    assert (program.keep_alive_default() / 1e9, program.load_timeout() / 1e9) == (kept, limit)


@pytest.mark.parametrize(("span", "text"), [(300 * 10**9, "5m0s"), (90 * 10**6, "0.09s"), (3661 * 10**9, "1h1m1s")])
def test_durations_are_written(span: int, text: str) -> None:
    assert program.go_span(span) == text


@pytest.mark.parametrize(
    ("text", "path", "shortest"),
    [
        ("m", "registry.ollama.ai/library/m/latest", "m:latest"),
        ("m:", "registry.ollama.ai/library/m/latest", "m:latest"),
        ("m:8b", "registry.ollama.ai/library/m/8b", "m:8b"),
        ("team/m", "registry.ollama.ai/team/m/latest", "team/m:latest"),
        ("box:5000/team/m:1", "box:5000/team/m/1", "box:5000/team/m:1"),
        ("http://box:5000/team/m", "box:5000/team/m/latest", "box:5000/team/m:latest"),
        ("hf.co/user/Repo-GGUF:Q4_K_M", "hf.co/user/Repo-GGUF/Q4_K_M", "hf.co/user/Repo-GGUF:Q4_K_M"),
    ],
)
def test_names(text: str, path: str, shortest: str) -> None:
    name = program.parse_name(text)
    assert name.valid
    assert (str(name.path), name.shortest) == (path, shortest)


@pytest.mark.parametrize("text", ["", ":8b", "a b", "../m", "box/../../m", "-m", "a.b/m:x/y"])
def test_what_is_no_name(text: str) -> None:
    assert not program.parse_name(text).valid


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 B"), (1500, "1.5 KB"), (1492864, "1.5 MB"), (12_300_000, "12 MB"), (5e9, "5 GB")]
)
def test_sizes(size: float, text: str) -> None:
    assert program.human_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (2623744, "2.62M"), (8_030_000_000, "8.0B"), (7_000_000_000, "7B"), (4500, "4K")]
)
def test_counts(count: int, text: str) -> None:
    assert program.human_number(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "Less than a second"), (1, "1 second"), (59, "59 seconds"), (61, "About a minute"), (300, "5 minutes"),
     (3600, "About an hour"), (86400, "24 hours"), (86400 * 10, "10 days"), (86400 * 30, "4 weeks")],
)  # fmt: skip
def test_spans_of_time(seconds: float, text: str) -> None:
    assert program.human_duration(timedelta(seconds=seconds)) == text


def test_json_is_written_as_go_writes_it() -> None:
    assert program.go_json({"a": "<b> & c\u2028", "d": [1, None], "é": True}) == (
        '{"a":"\\u003cb\\u003e \\u0026 c\\u2028","d":[1,null],"é":true}'
    )


def test_a_log_line_quotes_what_needs_it() -> None:
    assert [program.quoted(text) for text in ("plain", "two words", "", 'a"b', "a=b", 5)] == [
        "plain",
        '"two words"',
        '""',
        '"a\\"b"',
        '"a=b"',
        "5",
    ]
