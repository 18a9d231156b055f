# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Asking an endpoint whether it serves: readiness, whose process it is, which model, how much context, one answer.

Figures are those the server itself gives: ``/props`` names the context of one slot
(default_generation_settings.n_ctx), the number of slots (total_slots) and the file (model_path); ``/v1/models`` names
id and aliases; ``/metrics`` counts the requests at work and those that wait (llama.cpp 0.5.0, tools/server).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from ..faults import Fault, FaultError
from ..machine import Machine, Runner, run
from . import calibration, ignored
from .catalogue import CATALOGUE
from .listener import foreign
from .mapped import outdated
from .service import Status, journal_tail, status

PROMPT = "Reply with one short sentence."
#: A server that answers /health at all does so at once; longer means that it hangs.
HEALTH_SECONDS = 10.0
#: A piece of text that fills the answer this often is a repetition.
REPETITIONS = 4
#: The same where something else comes before it.
TAIL_REPETITIONS = 8
#: After this time a server has noticed that a connection was closed, and dropped its request.
GONE_SECONDS = 2.0


@dataclass(frozen=True)
class Question:
    """What is asked of the endpoint, and what is expected of it; null expects nothing.

    ``timeout``: seconds to wait until it is ready. ``answer_timeout``: seconds for the answer. ``memory``: what was
    counted for each GPU before the start (see memory.Counted.per_gpu).
    """

    base_url: str
    api_key: str | None = None
    model: str | None = None
    timeout: float = 600.0
    answer_timeout: float = 120.0
    context_per_request: int | None = None
    unit: str | None = None
    expect_gpu: bool | None = None
    prompt: str = PROMPT
    max_tokens: int = 48
    nvidia_smi: str = "nvidia-smi"
    model_files: Sequence[str] = ()
    validate_certs: bool = True
    memory: Sequence[Mapping[str, Any]] = ()

    @property
    def root(self) -> str:
        """The address without /v1, fit for messages: user and password are no part of it."""
        return re.sub(r"(?:/v1)?/*$", "", re.sub(r"^(\w+://)?[^/]*@", r"\1", self.base_url))

    @property
    def port(self) -> int:
        parts = urllib.parse.urlsplit(self.root)
        return parts.port or (443 if parts.scheme == "https" else 80)


@dataclass
class Finding:
    """What was found; null is unknown.

    ``state``: refused, unresponsive, unexpected, ended, loading, ready, or busy (ready, with every slot at work).
    ``ready_s``: seconds waited. ``processing`` and ``waiting``: requests of others when the question was asked.
    ``gpu_memory``: used MiB by GPU UUID. ``memory``: the same against what was counted.
    """

    state: str | None = None
    ready_s: float | None = None
    model: str | None = None
    context_per_request: int | None = None
    parallel: int | None = None
    processing: int | None = None
    waiting: int | None = None
    pid: int | None = None
    gpu_resident: bool | None = None
    gpu_memory: dict[str, int | None] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)
    answer: str | None = None
    completion_tokens: int | None = None
    tokens_per_second: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Reply:
    """An HTTP answer, or why there is none: ``problem`` is refused, timeout or broken; ``status`` is null then."""

    status: int | None
    body: bytes = b""
    problem: str = ""
    detail: str = ""

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def message(self) -> str:
        """The server's own words of an error, as far as there are any."""
        content = self.json()
        error = content.get("error") if isinstance(content, dict) else None
        text = error.get("message") if isinstance(error, dict) else None
        return str(text)[:300] if text else ""


@dataclass(frozen=True)
class Load:
    """Requests at work and waiting, and steps of computation since the server's start; null is unknown."""

    NAMES: ClassVar[tuple[str, ...]] = ("requests_processing", "requests_deferred", "n_decode_total")

    processing: int | None = None
    waiting: int | None = None
    decodes: float | None = None

    def fills(self, slots: int | None) -> bool:
        """Whether a further request would wait."""
        return bool(self.waiting) or (self.processing is not None and slots is not None and self.processing >= slots)


class _Here(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else: the key would be shown there, and what answers there was not asked about."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Client:
    """Plain HTTP without proxies: the endpoint is on this machine or in its network."""

    def __init__(self, root: str, api_key: str | None, validate_certs: bool = True) -> None:
        self._root = root
        self._key = api_key
        context = ssl.create_default_context()
        if not validate_certs:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _Here()
        )

    def get(self, path: str, timeout: float = HEALTH_SECONDS) -> Reply:
        return self._ask(urllib.request.Request(self._root + path), timeout)

    def post(self, path: str, content: dict[str, Any], timeout: float) -> Reply:
        request = urllib.request.Request(self._root + path, data=json.dumps(content).encode())
        request.add_header("Content-Type", "application/json")
        return self._ask(request, timeout)

    def _ask(self, request: urllib.request.Request, timeout: float) -> Reply:
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                return Reply(answer.status, answer.read())
        except urllib.error.HTTPError as exc:
            return Reply(exc.code, exc.read())
        except urllib.error.URLError as exc:
            return self._failed(exc.reason)
        except (OSError, http.client.HTTPException) as exc:
            return self._failed(exc)

    @staticmethod
    def _failed(reason: object) -> Reply:
        if isinstance(reason, TimeoutError):
            return Reply(None, problem="timeout", detail="timed out")
        if isinstance(reason, ConnectionRefusedError):
            return Reply(None, problem="refused", detail="connection refused")
        return Reply(None, problem="broken", detail=str(reason))


class Probe:
    """One examination of an endpoint. ``examine`` fills ``finding`` and returns the faults.

    ``gpu_machine`` is asked about GPUs (a simulator, perhaps), ``here`` about processes.
    """

    def __init__(
        self,
        question: Question,
        gpu_machine: Machine,
        here: Machine | None = None,
        runner: Runner = run,
        sleep: Callable[[float], None] = time.sleep,
        health_timeout: float = HEALTH_SECONDS,
    ) -> None:
        self._health_timeout = health_timeout
        self.question = question
        self.finding = Finding()
        #: Each GPU against what was counted for it; filled where the question names figures.
        self.held: list[calibration.Held] = []
        self._before = Load()
        self._started: float | None = None
        self._said: list[str] | None = None
        self._gpu_machine = gpu_machine
        self._here = here or Machine()
        self._run = runner
        self._sleep = sleep
        self._client = Client(question.root, question.api_key, question.validate_certs)

    def examine(self) -> list[Fault]:
        """Every check that still makes sense after the ones before it; one that ends the work is the last fault."""
        faults: list[Fault] = []
        try:
            self.wait_until_ready()
            faults += self._check_process()
            faults += self._check_files()
            faults += self._check_model()
            faults += self._check_context()
            faults += self._check_log()
            self._count_requests()
            faults += self._check_answer()
            faults += self._check_gpu()
        except FaultError as exc:
            faults.append(exc.fault)
        return faults

    # --- readiness ---------------------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Until /health answers 200. A service that has ended is reported at once, with its last lines."""
        begun = time.monotonic()
        # It asks for no key, and whose process answers is seen later.
        client = self._without_key()
        while True:
            reply = client.get("/health", self._health_timeout)
            waited = time.monotonic() - begun
            if reply.status == 200:
                if not isinstance(reply.json(), dict):
                    raise self._unexpected("/health answers 200 with something else than JSON")
                self.finding.ready_s = round(waited, 2)
                self.finding.state = "ready"
                return
            if reply.status is not None and reply.status != 503:
                raise self._unexpected(f"/health answers {reply.status}")
            self._check_alive()
            if waited >= self.question.timeout:
                raise self._not_ready(reply, waited)
            self._sleep(min(1.0, max(0.1, self.question.timeout - waited)))

    def _not_ready(self, reply: Reply, waited: float) -> FaultError:
        limit = f"{waited:.0f} s"
        states = {"timeout": "unresponsive", "broken": "unresponsive"}
        self.finding.state = "loading" if reply.status == 503 else states.get(reply.problem, "refused")
        if reply.status == 503:
            return self._fault(
                "endpoint_loading_timeout",
                f"still loading the model after {limit}",
                "A large model on a slow disk takes long: raise the time limit, or find out what the disk delivers."
                if self.question.timeout
                else "It is starting. Ask again, or wait for it; `systemctl status` says since when.",
            )
        if reply.problem == "timeout":
            seen, remedy = self._silent()
            what = f"takes connections and does not answer /health; waited {limit}{seen}"
            return self._fault("endpoint_unresponsive", what, remedy)
        what, remedy = f"{reply.detail}; waited {limit}", "Start the service, or correct host and port in base_url."
        if self.question.unit is not None:
            # One that has ended was told of before.
            unit = self.question.unit.removesuffix(".service")
            what += f"; {unit} is {self._status().words}"
            remedy = f"Ask again if it is starting, else see where it listens: systemctl cat {unit}"
        return self._fault("endpoint_refused", what, remedy)

    def _silent(self) -> tuple[str, str]:
        """What the process of a server that says nothing does, by the kernel, and what helps."""
        if self.question.unit is None:
            return "", "See the journal of the service; a process in state D hangs on a GPU and needs a reboot."
        unit = self.question.unit.removesuffix(".service")
        pid = self._status().pid
        stat = (self._here.read(f"/proc/{pid}/stat") if pid else None) or ""
        # The name, in brackets, may have spaces and brackets of its own.
        letter = (stat.rpartition(")")[2].split() or [""])[0]
        restart, see = f"systemctl restart {unit}", f"See `journalctl -u {unit} -n 50`"
        known = {
            "T": ("was stopped by a signal", f"kill -CONT {pid}, or: {restart}. {see}."),
            "t": ("is stopped by a debugger", f"End the debugger, or: {restart}. {see}."),
            "D": (
                "waits inside the kernel, as one does that hangs on a GPU or a disk",
                f"{see} and `dmesg`, then reboot.",
            ),
        }
        seen, remedy = known.get(letter, ("", f"{see}, then: {restart}"))
        return f"; its process {pid} {seen}" if seen else "", remedy

    def _check_alive(self) -> None:
        if self.question.unit is None:
            return
        now = self._status()
        # Between two starts the unit is "activating (auto-restart)": the process that was waited for is gone.
        if now.active in ("failed", "inactive") or now.sub == "auto-restart":
            self.finding.state = "ended"
            tail = journal_tail(self.question.unit, runner=self._run)
            lines = f". Its last lines:\n{tail}" if tail else ""
            remedy = f"See: journalctl -u {self.question.unit}"
            if now.sub == "auto-restart":
                remedy += "; systemd starts it again in some seconds, so ask once more then."
            raise FaultError(CATALOGUE.fault("service_not_running", self.question.unit, f"{now.words}{lines}", remedy))

    def _status(self) -> Status:
        assert self.question.unit is not None
        return status(self.question.unit, self._run)

    # --- what answers ------------------------------------------------------------------------------------------------

    def _check_process(self) -> list[Fault]:
        if self.question.unit is None:
            return []
        fault = self._foreign()
        if fault is None:
            return []
        if self.question.api_key:
            # All that follows would show it the key.
            raise FaultError(fault)
        return [fault]

    def _foreign(self) -> Fault | None:
        """The service's port, where another program than the service listens there."""
        if self.question.unit is None:
            return None
        now = self._status()
        self.finding.pid, self._started = now.pid, now.started
        found = foreign(self._here, self.question.port, self.finding.pid)
        if found is None:
            return None
        return CATALOGUE.fault(
            "foreign_listener",
            *found,
            "Stop that program, or give the service another port; requests reach the program, not the service.",
        )

    def _check_files(self) -> list[Fault]:
        if self.finding.pid is None:
            return []
        return [
            CATALOGUE.fault(
                "model_replaced",
                path,
                f"pid {self.finding.pid} has the former file loaded, not the one on the disk now",
                f"Restart it: systemctl restart {self.question.unit}",
            )
            for path in outdated(self.finding.pid, self.question.model_files)
        ]

    def _check_model(self) -> list[Fault]:
        reply = self._client.get("/v1/models")
        if reply.status in (401, 403):
            given = "refuses the API key" if self.question.api_key else "asks for an API key and none was given"
            raise self._fault(
                "wrong_key",
                f"{reply.status} {reply.message or ''}: the server {given}",
                "Give a key that is in the server's key file; the server reads that file once, at its start.",
            )
        content = reply.json()
        entries = content.get("data") if isinstance(content, dict) else None
        if reply.status != 200 or not isinstance(entries, list):
            raise self._unexpected(f"/v1/models answers {reply.status or reply.detail} without a list of models")
        names = [
            str(name) for entry in entries if isinstance(entry, dict) for name in (entry.get("id"), *_aliases(entry))
        ]
        self.finding.model = names[0] if names else None
        faults = []
        if self.question.api_key and self._without_key().get("/v1/models").status == 200:
            faults.append(
                CATALOGUE.fault(
                    "key_not_enforced",
                    self.question.root,
                    "answers requests without the API key",
                    "The server runs without --api-key-file: restart the service, or see which process answers.",
                )
            )
        if self.question.model and self.question.model not in names:
            faults.append(
                CATALOGUE.fault(
                    "wrong_model",
                    "model",
                    f"expected {self.question.model}, the server offers {', '.join(dict.fromkeys(names)) or 'none'}",
                    "Restart the service with the model wanted, or correct the name.",
                )
            )
        return faults

    def _without_key(self) -> Client:
        return Client(self.question.root, None, self.question.validate_certs)

    def _check_context(self) -> list[Fault]:
        faults: list[Fault] = []
        content = self._client.get("/props").json()
        if isinstance(content, dict):
            slot = content.get("default_generation_settings")
            self.finding.context_per_request = _whole(slot.get("n_ctx") if isinstance(slot, dict) else None)
            self.finding.parallel = _whole(content.get("total_slots"))
            faults += self._check_path(content.get("model_path"))
        granted, asked = self.finding.context_per_request, self.question.context_per_request
        if asked is not None and granted is not None and granted < asked:
            faults.append(
                CATALOGUE.fault(
                    "context_short",
                    "context_per_request",
                    f"{granted} tokens granted, {asked} asked for",
                    "The engine's -c is the total of all requests; role llama_server computes it.",
                )
            )
        return faults

    def _check_path(self, path: object) -> list[Fault]:
        """Whether the file that the server names is the one expected: an alias alone can stand for any file."""
        wanted = self.question.model_files
        if not wanted or not isinstance(path, str) or not path or os.path.realpath(path) == os.path.realpath(wanted[0]):
            return []
        return [
            CATALOGUE.fault(
                "wrong_model",
                "model",
                f"expected {wanted[0]}, the server has loaded {path}",
                "Restart the service; if it stays so, another server answers on this address.",
            )
        ]

    def _check_log(self) -> list[Fault]:
        """What the server said at its start of options that have no effect. It serves all the same, and not as told."""
        unit = self.question.unit
        if unit is None or self.finding.pid is None:
            return []
        self._said = ignored.start_lines(unit, self.finding.pid, self._started, self._run)
        return [
            CATALOGUE.fault(
                "option_ignored",
                unit,
                line,
                "Remove the option, or give the server what it needs: a GPU that works, or an engine built with CUDA.",
            )
            for line in ignored.ignored(self._said)
        ]

    # --- the answer --------------------------------------------------------------------------------------------------

    def _load(self) -> Load:
        """What the server says of its work; null where it does not tell."""
        reply = self._client.get("/metrics")
        text = reply.body.decode("utf-8", "replace") if reply.status == 200 else ""
        found = dict(re.findall(r"(?m)^llamacpp:(\w+) ([\d.eE+]+)$", text))
        numbers = [float(found[name]) if name in found else None for name in Load.NAMES]
        processing, waiting, decodes = numbers
        return Load(_whole(processing), _whole(waiting), decodes)

    def _count_requests(self) -> None:
        self._before = self._load()
        self.finding.processing, self.finding.waiting = self._before.processing, self._before.waiting
        if self._before.fills(self.finding.parallel):
            self.finding.state = "busy"

    def _unanswered(self, reply: Reply, elapsed: float) -> FaultError:
        """Why there was no answer: busy with others, hanging although it says it is ready, or failed."""
        if reply.problem == "timeout":
            limit = f"no answer within {elapsed:.0f} s"
            # The server drops our own question when the connection goes; until then it would count as another's.
            self._sleep(GONE_SECONDS)
            now = self._load()
            if now.fills(self.finding.parallel) and now.decodes != self._before.decodes:
                self.finding.state = "busy"
                slots = f"{now.processing} of {self.finding.parallel or '?'} slots at work, {now.waiting or 0} requests"
                return FaultError(
                    CATALOGUE.fault(
                        "endpoint_busy",
                        self.question.root,
                        f"{slots} wait; {limit}, so nothing is proved of its answers",
                        "Ask again when less is asked of it, or with a larger answer_timeout; more `parallel` on the "
                        "server, or clients that ask for fewer at once, make it shorter.",
                    )
                )
            if now.processing is not None and (now.processing == 0 or now.decodes == self._before.decodes):
                what = "idle" if now.processing == 0 else f"at work on {now.processing} requests without getting on"
                return FaultError(
                    CATALOGUE.fault(
                        "endpoint_stalled",
                        self.question.root,
                        f"says it is ready, is {what}; asked twice, {limit}",
                        f"Restart it: systemctl restart {self.question.unit or 'the service'}; if it comes again, see "
                        "the journal and `journalctl -k --grep NVRM`.",
                    )
                )
        what = f"HTTP {reply.status}: {reply.message}" if reply.status else reply.detail
        return self._fault(
            "completion_failed",
            f"the test question got no answer ({what.rstrip(': ')})",
            "See the journal of the service; a server that is busy needs a larger answer_timeout.",
        )

    def _check_answer(self) -> list[Fault]:
        # No randomness: the same server gives the same answer, and one that repeats a token does so every time.
        content: dict[str, Any] = {
            "messages": [{"role": "user", "content": self.question.prompt}],
            "max_tokens": self.question.max_tokens,
            "temperature": 0,
            "seed": 1,
        }
        if self.finding.model:
            content["model"] = self.finding.model
        for again in (False, True):
            begun = time.monotonic()
            reply = self._client.post("/v1/chat/completions", content, self.question.answer_timeout)
            elapsed = time.monotonic() - begun
            if reply.status == 200:
                break
            self._check_alive()
            problem = self._unanswered(reply, elapsed)
            # One question can get lost. A restart, which ends the requests of others, is advised after a second alone.
            if again or problem.fault.code != "endpoint_stalled":
                raise problem
            self._before = self._load()
        body = reply.json()
        text, tokens, rate = _read_completion(body)
        self.finding.answer = text.strip() if text else None
        self.finding.completion_tokens = tokens
        if rate is None and tokens and elapsed > 0:
            rate = tokens / elapsed
        self.finding.tokens_per_second = round(rate, 2) if rate is not None else None
        fault = judge_answer(text, tokens)
        return [fault] if fault else []

    def _check_gpu(self) -> list[Fault]:
        """Whether the service's process holds memory on a GPU, by nvidia-smi's list of compute processes."""
        if not self.question.expect_gpu:
            return []
        if self.finding.pid is None:
            return [_gpu_unknown("the process of the service is not known", "Give unit.")]
        query = ["--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
        done = self._gpu_machine.run([self.question.nvidia_smi, *query])
        if not done.ok:
            what = "not found" if done.missing else "no answer in time" if done.timed_out else f"exit status {done.rc}"
            return [_gpu_unknown(f"{self.question.nvidia_smi}: {what}", "See module gpu_inventory.")]
        for line in done.stdout.splitlines():
            fields = [part.strip() for part in line.split(",")]
            if len(fields) == 3 and fields[1] == str(self.finding.pid):
                self.finding.gpu_memory[fields[0]] = _whole(fields[2])
        self.finding.gpu_resident = bool(self.finding.gpu_memory)
        if self.finding.gpu_resident:
            self.held = calibration.compare(self.question.memory, self.finding.gpu_memory)
            self.finding.memory = [gpu.as_dict() for gpu in self.held]
            return calibration.judge(self.held)
        said = ignored.without_gpu(self._said or [])
        return [
            CATALOGUE.fault(
                "cpu_fallback",
                f"pid {self.finding.pid}",
                f"holds no memory on any GPU: the model runs on the CPU{f'. It said: {said}' if said else ''}",
                "See the journal for 'no usable GPU'; the usual causes are device nodes that came after the service "
                "(restart it), an engine built without CUDA, and a driver that does not answer.",
            )
        ]

    def _unexpected(self, what: str) -> FaultError:
        self.finding.state = "unexpected"
        foreign = self._foreign()
        if foreign:
            return FaultError(replace(foreign, message=f"{foreign.message}; {what}"))
        return self._fault(
            "endpoint_unexpected",
            f"{what}: this is not llama-server",
            "Correct host and port in base_url, or see which program listens there: ss -ltnp",
        )

    def _fault(self, code: str, message: str, remedy: str) -> FaultError:
        return FaultError(CATALOGUE.fault(code, self.question.root, message, remedy))


def check_address(base_url: str) -> Fault | None:
    """What stands against an address of a server, if anything; the address is shown without user and password."""
    try:
        parts = urllib.parse.urlsplit(base_url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    shown = base_url.rpartition("@")[2]
    if sound and shown == base_url and base_url.isprintable() and " " not in base_url:
        return None
    problem = "names a user, which llama-server does not know: it has keys" if sound and shown != base_url else ""
    return CATALOGUE.fault(
        "setting_invalid",
        "base_url",
        f"{shown!r} {problem or 'is no address of a server'}",
        "Write it like http://127.0.0.1:8080/v1, and a key into `api_key`.",
    )


def own_address() -> str | None:
    """This machine's address towards others; null without a default route. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # An address of documentation (RFC 5737): only the route to it is looked up.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return None


def judge_answer(text: str | None, tokens: int | None) -> Fault | None:
    """Null for an answer that is text; HTTP 200 alone proves nothing (a broken attention kernel yields NULs)."""
    count = f"{tokens} tokens" if tokens is not None else "an unknown number of tokens"
    remedy = "Ask again by hand; if it stays so, the engine computes wrongly on this GPU: see docs/troubleshooting.md."
    # Marks of a template and characters without width are no text.
    shown = re.sub(r"</?think(?:ing)?>|[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]", "", text or "")
    if not shown.strip():
        return CATALOGUE.fault("empty_answer", "answer", f"no text in {count}", remedy)
    broken = sum(1 for char in shown if char == "\ufffd" or (char < " " and char not in "\t\r\n"))
    if broken * 2 >= len(shown):
        what = f"{broken} of {len(shown)} characters are NUL or other control characters"
        return CATALOGUE.fault("garbled_answer", "answer", what, remedy)
    for words in (shown, shown.strip(), shown.strip() + " "):
        period = _periods(words)[-1]
        if period * REPETITIONS <= len(words):
            what = f"one piece of text repeated {len(words) // period} times"
            return CATALOGUE.fault("garbled_answer", "answer", what, remedy)
    # A first token may come out right before the cache is read. Most of the text must be the repetition: a list or a
    # ruled line at the end is none.
    tail = shown.strip()[::-1]
    for length, period in enumerate(_periods(tail), 1):
        if length * 2 > len(tail) and period * TAIL_REPETITIONS <= length:
            what = f"it ends in one piece of text repeated {length // period} times"
            return CATALOGUE.fault("garbled_answer", "answer", what, remedy)
    solid = "".join(shown.split())
    if len(solid) >= TAIL_REPETITIONS and len(set(solid)) == 1:
        return CATALOGUE.fault("garbled_answer", "answer", f"nothing but {solid[0]!r}, {len(solid)} times", remedy)
    return None


def _periods(text: str) -> list[int]:
    """For each beginning of ``text``, the shortest piece that it is repetitions of, the last perhaps cut short."""
    # borders[i]: length of the longest proper prefix of text[:i + 1] that is also its suffix (Knuth, Morris, Pratt).
    borders = [0] * len(text)
    for at in range(1, len(text)):
        length = borders[at - 1]
        while length and text[at] != text[length]:
            length = borders[length - 1]
        borders[at] = length + 1 if text[at] == text[length] else 0
    return [at + 1 - border for at, border in enumerate(borders)]


def _gpu_unknown(message: str, remedy: str) -> Fault:
    return CATALOGUE.fault("gpu_state_unknown", "gpu_resident", message, remedy)


def _aliases(entry: dict[str, Any]) -> list[str]:
    aliases = entry.get("aliases")
    return [str(alias) for alias in aliases] if isinstance(aliases, list) else []


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _read_completion(body: Any) -> tuple[str | None, int | None, float | None]:
    """Text, number of tokens, and tokens a second of a chat completion; reasoning counts as text."""
    if not isinstance(body, dict):
        return None, None, None
    usage, timings, choices = body.get("usage"), body.get("timings"), body.get("choices")
    tokens = _whole(usage.get("completion_tokens")) if isinstance(usage, dict) else None
    rate = timings.get("predicted_per_second") if isinstance(timings, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    parts = [message.get(key) or "" for key in ("reasoning_content", "content")] if isinstance(message, dict) else []
    speed = float(rate) if isinstance(rate, (int, float)) and math.isfinite(rate) else None
    return "".join(map(str, parts)) or None, tokens, speed
