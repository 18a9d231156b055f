# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Proving that Ollama serves a model: loaded, on the GPUs, with the whole of a long prompt, for as long as was asked.

What it says by itself proves little: C(size_vram) of C(/api/ps) is its own plan of memory, and a prompt that is longer
than the context is cut without an error. As soon as every layer of a model is on the GPUs, C(size_vram) counts what
always stays with the host as well (llm/server.go of 0.24.0, MemorySize: the table of input embeddings and the host's
part of the graph; llama_server.go of 0.30.5 leaves that part out of both figures), so that the two are equal then. For
a release that counts otherwise, as much as that table takes is let pass.
"""

from __future__ import annotations

import json
import random
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..faults import Fault, FaultError, is_fatal
from ..files import replace_file
from ..machine import Machine, Runner, run
from ..serving.listener import foreign, unit_of
from ..serving.probe import judge_answer
from ..serving.service import full_name, journal_tail, status
from .catalogue import fault
from .client import ApiError, Client, plain
from .environment import seconds
from .errors import not_answering
from .names import parse_name
from .service_log import Said, read_log

#: What is asked to measure the speed. Neither it nor the answer is kept.
PROMPT = "Describe a mountain lake in three sentences."
ANSWER_TOKENS = 64
#: Plain words; no tokenizer joins two of them, so that there are at least as many tokens as words.
WORDS = ("river", "stone", "light", "green", "house", "night", "cloud", "paper", "table", "water")
#: A server that answers at all tells its version at once.
VERSION_SECONDS = 10.0
#: Bytes of 32 weights, rounded up, in the types that tables of embeddings have. In another type nothing is let pass.
BYTES_OF_32 = {
    **{"F32": 128, "F16": 64, "BF16": 64, "Q8_0": 34, "Q6_K": 27, "Q5_K": 22, "Q5_0": 22, "Q4_K": 18, "Q4_0": 18},
    **{"Q3_K": 14, "Q2_K": 11},
}
#: How Ollama says that the process of a model ended.
ENDED = re.compile(r"has terminated|no longer running|unexpectedly stopped|error starting (?:runner|llama-server)")
#: Nothing that a service is told lasts as long, and "for ever" lasts longer.
FOR_EVER_S = 10 * 365 * 86400.0
#: A model that stays for less is loaded once more, to be looked at.
LEAST_LEFT_S = 5.0


@dataclass(frozen=True)
class Question:
    """What is to be proved; null expects nothing.

    ``keep_alive``: as OLLAMA_KEEP_ALIVE has it. ``timeout``, ``load_timeout`` and ``answer_timeout``: seconds until it
    answers at all, until the model is loaded, and for an answer. ``load``: whether the model may be loaded for this.
    Without ``model`` the one in memory is taken, else the smallest that makes text. ``proofs``: file that keeps what
    was proved, ``proof_of`` the settings under which that counts.
    """

    base_url: str
    model: str | None = None
    expect_gpu: bool = True
    expect_context: int | None = None
    keep_alive: str | None = None
    prompt_tokens_over: int = 4096
    unit: str | None = None
    timeout: float = 60.0
    load_timeout: float = 600.0
    answer_timeout: float = 300.0
    load: bool = True
    proofs: str | None = None
    proof_of: str = ""
    nvidia_smi: str = "nvidia-smi"

    @property
    def root(self) -> str:
        return re.sub(r"(?:/v1)?/*$", "", self.base_url)

    @property
    def port(self) -> int:
        parts = urllib.parse.urlsplit(self.root)
        return parts.port or (443 if parts.scheme == "https" else 80)


@dataclass
class Finding:
    """What was found; null is unknown. ``size`` and ``size_vram`` are bytes, ``gpu_memory`` MiB by GPU UUID. ``kind``
    is C(completion) or C(embedding). ``proved_before``: whether it was left as it is, in use or not, as it was proved.
    """

    model: str | None = None
    kind: str | None = None
    proved_before: bool = False

    version: str | None = None
    ready_s: float | None = None
    load_s: float | None = None
    pid: int | None = None
    loaded_before: bool | None = None
    size: int | None = None
    size_vram: int | None = None
    gpu_share: float | None = None
    gpu_memory: dict[str, int | None] = field(default_factory=dict)
    context: int | None = None
    prompt_tokens: int | None = None
    tokens_per_second: float | None = None
    expires_at: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Probe:
    """One examination. ``examine`` fills ``finding`` and returns the faults.

    ``gpu_machine`` is asked about GPUs (a simulator, perhaps), ``here`` about processes.
    """

    def __init__(
        self,
        question: Question,
        gpu_machine: Machine,
        here: Machine | None = None,
        runner: Runner = run,
        sleep: Callable[[float], None] = time.sleep,
        patience: float = VERSION_SECONDS,
    ) -> None:
        self.question = question
        self.finding = Finding()
        #: Whether there was a model to look at.
        self.judged = False
        self._key: tuple[str, ...] = ()
        if question.model is not None:
            self._take(question.model)
        self._digest = ""
        self._shown: dict[str, Any] | None = None
        self._gpu_machine = gpu_machine
        self._here = here or Machine()
        self._run = runner
        self._sleep = sleep
        self._client = Client(question.root, patience)

    def examine(self) -> list[Fault]:
        """Every check that still makes sense after the ones before it; one that ends the work is the last fault."""
        faults: list[Fault] = []
        try:
            self._wait_until_ready()
            faults += self._check_process()
            self._check_listed()
            before = self._entry()
            self.finding.loaded_before = before is not None
            self._makes_vectors()
            if not self.question.load:
                if before is not None:
                    faults += self._judge(before)
                return faults
            if self._in_use(before) and (self.question.model is None or self._proved()):
                self.finding.proved_before = True
                return faults + (self._judge(before, False) if before else self._log_faults(self._said(), None))
            self._load()
            entry = self._entry()
            # One that is about to go would be gone from the cards before they are looked at.
            left = remaining(entry) if entry else 0.0
            faults += self._judge(entry if entry and (left is None or left >= LEAST_LEFT_S) else self._kept())
            faults += self._check_answer()
            faults += self._check_long_prompt()
            faults += self._check_keep_alive()
            if not any(map(is_fatal, faults)):
                faults += self._keep_proof()
        except FaultError as exc:
            faults.append(exc.fault)
            # Why it failed to load is in its log, as a rule.
            faults += [] if self.judged else self._log_faults(self._said(), None)
        except ApiError as exc:
            faults.append(not_answering(exc, self.question.root))
        return faults

    # --- readiness ---------------------------------------------------------------------------------------------------

    def _wait_until_ready(self) -> None:
        begun = time.monotonic()
        while True:
            try:
                self.finding.version = self._client.version()
            except ApiError as exc:
                waited = time.monotonic() - begun
                # Another program, or an Ollama that cannot go on: waiting makes it no better.
                if exc.kind in ("said", "unexpected"):
                    raise FaultError(not_answering(exc, self.question.root)) from None
                self._check_alive()
                if waited >= self.question.timeout:
                    text = f"{exc.text}; waited {waited:.0f} s"
                    raise FaultError(not_answering(ApiError(exc.kind, text), self.question.root)) from None
                self._sleep(min(1.0, max(0.1, self.question.timeout - waited)))
                continue
            self.finding.ready_s = round(time.monotonic() - begun, 2)
            return

    def _check_alive(self) -> None:
        unit = self.question.unit
        if unit is None:
            return
        now = status(unit, self._run)
        # Between two starts the unit is "activating (auto-restart)": the process that was waited for is gone.
        if now.active in ("failed", "inactive") or now.sub == "auto-restart":
            tail = journal_tail(unit, runner=self._run)
            lines = f". Its last lines:\n{tail}" if tail else ""
            raise FaultError(fault("service_not_running", unit, f"{now.words}{lines}", f"See: journalctl -u {unit}"))

    def _check_process(self) -> list[Fault]:
        unit = self.question.unit
        if unit is None:
            return []
        self.finding.pid = status(unit, self._run).pid
        found = foreign(self._here, self.question.port, self.finding.pid)
        if found is None:
            return []
        return [
            fault(
                "foreign_listener",
                *found,
                "Stop that program (an `ollama serve` started by hand is one), or give the service another port.",
            )
        ]

    # --- the model ---------------------------------------------------------------------------------------------------

    def _same(self, entry: Mapping[str, Any]) -> bool:
        try:
            return parse_name(str(entry.get("model") or entry.get("name"))).key == self._key
        except FaultError:
            return False

    def _take(self, name: str) -> None:
        self._key = parse_name(name).key
        self._model = self.finding.model = name

    def _check_listed(self) -> None:
        entries = self._client.tags()
        if self.question.model is None:
            self._choose(entries)
        found = next(filter(self._same, entries), None)
        if found is not None:
            self._digest = str(found.get("digest") or "")
            return
        listed = ", ".join(str(entry.get("name")) for entry in entries[:10]) or "none"
        remedy = "Bring it with module ollama_model, or correct the name."
        raise FaultError(fault("ollama_model_unknown", self._model, f"is not there; listed: {listed}", remedy))

    def _choose(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """The model that is in memory, so that none is pushed out; else the smallest that makes text."""
        here = [str(entry.get("name")) for entry in sorted(entries, key=lambda entry: _whole(entry.get("size")) or 0)]
        for entry in self._client.loaded():
            self._take(str(entry.get("model") or entry.get("name")))
            if any(map(self._same, entries)):
                return
        for name in here:
            self._take(name)
            self._shown = None
            if not self._makes_vectors():
                return
        if not here:
            raise FaultError(
                fault(
                    "ollama_model_unknown", plain(self.question.root), "no model is there", "Name one in ollama_models."
                )
            )

    def _told(self) -> dict[str, Any]:
        """What /api/show tells of the model; empty where it does not."""
        if self._shown is None:
            try:
                self._shown = self._client.show(self._model)
            except ApiError:
                self._shown = {}
        return self._shown

    def _makes_vectors(self) -> bool:
        """Whether it is asked for vectors and not for text; releases before 0.6.4 do not list what a model can do."""
        able = self._told().get("capabilities")
        if isinstance(able, list) and able:
            vectors = "embedding" in able and "completion" not in able
        else:
            info = self._told().get("model_info")
            vectors = isinstance(info, Mapping) and any(str(key).endswith(".pooling_type") for key in info)
        self.finding.kind = "embedding" if vectors else "completion"
        return vectors

    def _own_limit(self) -> tuple[int, str] | None:
        """Tokens that the model itself limits its context to, and why; null where it says nothing of it."""
        found = []
        own = re.search(r"^num_ctx\s+\"?(\d+)", str(self._told().get("parameters") or ""), re.MULTILINE)
        if own:
            found.append((int(own[1]), f"it has num_ctx {own[1]} as a parameter of its own"))
        info = self._told().get("model_info")
        info = info if isinstance(info, Mapping) else {}
        made_for = _whole(info.get(f"{info.get('general.architecture')}.context_length"))
        if made_for:
            found.append((made_for, f"it was made for {made_for}"))
        return min(found, default=None)

    def _wanted_context(self) -> int | None:
        asked, limit = self.question.expect_context, self._own_limit()
        return asked if asked is None or limit is None else min(asked, limit[0])

    # --- what is in use, and what was proved --------------------------------------------------------------------

    def _in_use(self, before: Mapping[str, Any] | None) -> bool:
        """Whether questions would take a model from those who work with it: another one pushed out, or this one loaded
        anew because somebody asked for another context."""
        if before is None:
            return bool(self._client.loaded())
        has, wanted = _whole(before.get("context_length")), self._wanted_context()
        if has is None or wanted is None:
            return False
        # Less than asked for, under its own name, is what has to be found out.
        return has > wanted or (has != wanted and not self._same(before))

    def _proofs(self) -> dict[str, str]:
        try:
            kept = json.loads(Path(str(self.question.proofs)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(key): str(value) for key, value in kept.items()} if isinstance(kept, dict) else {}

    def _proved(self) -> bool:
        if self.question.proofs is None or not self._digest:
            return False
        return self._proofs().get(self._digest) == self.question.proof_of

    def _keep_proof(self) -> list[Fault]:
        if self.question.proofs is None or not self._digest:
            return []
        # What held under other settings is of no use any more.
        kept = {key: value for key, value in self._proofs().items() if value == self.question.proof_of}
        if kept.get(self._digest) == self.question.proof_of:
            return []
        kept[self._digest] = self.question.proof_of
        try:
            replace_file(Path(self.question.proofs), (json.dumps(kept, indent=1, sort_keys=True) + "\n").encode())
        except OSError as exc:
            message = f"{self.question.proofs} is not written: {exc.strerror or exc}"
            remedy = "Run as root; the model itself is not concerned, and is loaded for the next proof."
            return [fault("proof_not_kept", self._model, message, remedy)]
        return []

    def _entry(self) -> dict[str, Any] | None:
        """The model as /api/ps has it; null when it is not loaded.

        Models of the same weights share a process, which keeps the name of the one that it was started for.
        """
        entries = self._client.loaded()
        found = next(filter(self._same, entries), None)
        weights = weights_of(self._told()) if found is None and entries else None
        if weights is None:
            return found
        return next((entry for entry in entries if self._weights_of(entry) == weights), None)

    def _weights_of(self, entry: Mapping[str, Any]) -> str | None:
        try:
            return weights_of(self._client.show(str(entry.get("model") or entry.get("name"))))
        except ApiError:
            return None

    def _load(self, keep_alive: str | None = None) -> None:
        content: dict[str, Any] = {"model": self._model, "stream": False}
        path = "/api/generate"
        if self._makes_vectors():
            # The other one refuses such a model. Without input neither does more than load it.
            path, content = "/api/embed", {"model": self._model, "input": ""}
        if keep_alive is not None:
            content["keep_alive"] = keep_alive
        begun = time.monotonic()
        try:
            self._post(path, content, self.question.load_timeout)
        except ApiError as exc:
            raise FaultError(self._load_fault(exc, time.monotonic() - begun)) from None
        if self.finding.load_s is None:
            self.finding.load_s = round(time.monotonic() - begun, 2)

    def _kept(self) -> dict[str, Any]:
        """Loaded for a minute, where the service itself keeps nothing loaded."""
        self._load("1m")
        entry = self._entry()
        if entry is None:
            message = "was loaded and is not in memory right after"
            raise FaultError(fault("ollama_error", self._model, message, self._look))
        return entry

    @property
    def _look(self) -> str:
        return f"See: journalctl -u {self.question.unit or 'ollama'}"

    def _load_fault(self, error: ApiError, waited: float) -> Fault:
        """Why a model was not loaded. A runner that ended and one that was too slow look alike to a client."""
        model, text, low = self._model, error.text, error.text.lower()
        if error.kind == "silent":
            return fault(
                "ollama_load_timeout",
                model,
                f"was not loaded within {waited:.0f} s, and the server is still at it",
                "Ask again with a larger load_timeout, or find out what the disk delivers.",
            )
        if "timed out waiting for" in low:
            progress = re.search(r"progress ([\d.]+)", low)
            far = f" at progress {progress[1]}" if progress else ""
            return fault(
                "ollama_load_timeout",
                model,
                f"the server's own time limit ended the load{far}: {plain(text)}",
                "Nothing crashed: the model is larger than the disk and the time limit allow. Raise "
                "OLLAMA_LOAD_TIMEOUT (role ollama: ollama_load_timeout).",
            )
        if ENDED.search(low):
            return fault(
                "ollama_runner_crashed",
                model,
                f"the process that loads it ended: {plain(text)}",
                f"A time limit has no part in it. {self._look}; the lines before the end name the cause. If another "
                "release of Ollama loaded it, go back to that one.",
            )
        if error.kind in ("refused", "broken"):
            return fault(
                "ollama_runner_crashed",
                model,
                f"the server itself went away while it loaded the model ({plain(text)})",
                self._look,
            )
        return fault("ollama_error", model, f"is not loaded: {plain(text)}", self._look)

    # --- where it runs -----------------------------------------------------------------------------------------------

    def _judge(self, entry: Mapping[str, Any], context: bool = True) -> list[Fault]:
        self.judged = True
        found = self.finding
        found.size, found.size_vram = _whole(entry.get("size")), _whole(entry.get("size_vram"))
        # What is on no GPU is left out by some releases instead of being 0.
        if found.size and found.size_vram is None:
            found.size_vram = 0
        if found.size and found.size_vram is not None:
            found.gpu_share = round(min(found.size_vram / found.size, 1.0), 4)
        found.context = _whole(entry.get("context_length"))
        expires = entry.get("expires_at")
        found.expires_at = str(expires) if expires else None
        said = self._said()
        faults = [*self._check_share(said), *self._log_faults(said, found.gpu_share)]
        return faults + (self._check_context() if context else [])

    def _check_share(self, said: Said) -> list[Fault]:
        found = self.finding
        if not self.question.expect_gpu:
            return []
        if not found.size or found.size_vram is None:
            message = "the server does not tell how much of the model is on the GPUs"
            return [fault("gpu_state_unknown", self._model, message, "Give `unit`, and see nvidia-smi.")]
        why = f" It said: {'; '.join(said.no_gpu)}." if said.no_gpu else ""
        remedy = (
            "Usual causes: a release from 0.30 on under a driver older than 550, device nodes that came after the "
            "service (restart it), no lib/ollama/cuda_v12, CUDA_VISIBLE_DEVICES that names no GPU. "
            f"{self._look}"
        )
        if found.size_vram == 0:
            message = f"all {found.size} bytes of it are on the CPU.{why}"
            return [fault("cpu_fallback", self._model, message, remedy)]
        faults = []
        missing = found.size - found.size_vram
        if missing > 0 and missing > self._host_side():
            share = f"{missing} of {found.size} bytes ({missing / found.size:.0%}) are on the CPU"
            faults.append(
                fault(
                    "ollama_partly_on_cpu",
                    self._model,
                    f"{share}.{why}",
                    "It does not fit beside what else is on the GPUs, or a GPU is not used: less context, a smaller "
                    "quantisation, fewer models at once, or see nvidia-smi for what holds the memory.",
                )
            )
        return faults + self._check_memory(remedy)

    def _host_side(self) -> int:
        """Bytes of the table of input embeddings, which is always with the host; 0 where that is not told."""
        tensors = self._told().get("tensors")
        total = 0
        for tensor in tensors if isinstance(tensors, list) else []:
            name, shape = str(tensor.get("name", "")), tensor.get("shape")
            if name.startswith(("token_embd.", "per_layer_token_embd.")) and isinstance(shape, list):
                weights = 1
                for length in shape:
                    weights *= _whole(length) or 0
                total += weights // 32 * BYTES_OF_32.get(str(tensor.get("type")), 0)
        return total

    def _check_memory(self, remedy: str) -> list[Fault]:
        """Whether a process of the service holds memory of a GPU, by nvidia-smi's list."""
        if self.question.unit is None:
            return []
        query = ["--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
        done = self._gpu_machine.run([self.question.nvidia_smi, *query])
        if not done.ok:
            message = f"{self.question.nvidia_smi}: {done.why}"
            return [fault("gpu_state_unknown", self.question.unit, message, "See module gpu_inventory.")]
        wanted = full_name(self.question.unit)
        held = self.finding.gpu_memory
        for line in done.stdout.splitlines():
            fields = [part.strip() for part in line.split(",")]
            pid = _whole(fields[1]) if len(fields) == 3 else None
            if pid is not None and unit_of(self._here, pid) == wanted:
                held[fields[0]] = _sum(held[fields[0]], _whole(fields[2])) if fields[0] in held else _whole(fields[2])
        if held:
            return []
        message = f"it says that {self.finding.size_vram} bytes are on GPUs, and no process of it holds memory there"
        return [fault("cpu_fallback", wanted, message, remedy)]

    def _said(self) -> Said:
        """What the service said of GPUs and settings since its start."""
        return read_log(self.question.unit, self._run) if self.question.unit else Said()

    def _log_faults(self, said: Said, share: float | None) -> list[Fault]:
        unit = str(self.question.unit)
        faults = []
        if self.question.expect_gpu:
            faults = [
                fault(
                    "ollama_device_skipped",
                    unit,
                    f"a GPU is not used: {line}",
                    "The library that was tried has no code for this GPU: V100 (7.0) needs cuda_v12 (role ollama: "
                    "ollama_llm_library), and a release that still has it.",
                )
                for line in said.skipped
            ]
            faults += [
                fault(
                    "ollama_ignores_gpu", unit, line, "Install the release that compat_check names, or a newer driver."
                )
                for line in said.too_old
            ]
            if said.no_gpu and share is None:
                message = f"at its start it found no GPU: {'; '.join(said.no_gpu)}"
                faults.append(
                    fault("cpu_fallback", unit, message, f"systemctl restart {unit}, once nvidia-smi answers.")
                )
        remedy = "Correct the setting, or remove it."
        return faults + [fault("option_ignored", unit, line, remedy) for line in said.ignored]

    def _check_context(self) -> list[Fault]:
        granted, asked, limit = self.finding.context, self.question.expect_context, self._own_limit()
        if asked is None or granted is None or granted >= asked:
            return []
        if limit is not None and granted >= limit[0]:
            message = f"is loaded with {granted} tokens instead of {asked}: {limit[1]}"
            remedy = "Tell those who use it, or choose a model for longer texts."
            return [fault("ollama_context_own", self._model, message, remedy)]
        message = f"{self._model} is loaded with {granted} tokens, {asked} asked for"
        remedy = (
            "OLLAMA_CONTEXT_LENGTH of the service holds for models without num_ctx of their own, and at most what the "
            "model was made for; another drop-in may set it (systemctl cat ollama)."
        )
        return [fault("context_short", "context", message, remedy)]

    # --- answers -----------------------------------------------------------------------------------------------------

    def _post(self, path: str, content: Mapping[str, Any], limit: float) -> dict[str, Any]:
        end = time.monotonic() + limit
        lines = list(self._client.follow(path, content, lambda: end - time.monotonic()))
        return lines[-1] if lines else {}

    def _ask(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._post(path, content, self.question.answer_timeout)
        except ApiError as exc:
            if ENDED.search(exc.text.lower()):
                raise FaultError(self._load_fault(exc, 0)) from None
            what = f"within {self.question.answer_timeout:.0f} s" if exc.kind == "silent" else f"({plain(exc.text)})"
            message = f"{path}: the test question got no answer {what}"
            remedy = f"{self._look}; a server that is busy needs a larger answer_timeout."
            raise FaultError(fault("completion_failed", plain(self.question.root), message, remedy)) from None

    def _check_answer(self) -> list[Fault]:
        if self._makes_vectors():
            return self._check_vector()
        options = {"num_predict": ANSWER_TOKENS, "temperature": 0, "seed": 1}
        content = {"model": self._model, "prompt": PROMPT, "stream": False, "options": options}
        told = self._ask("/api/generate", content)
        tokens, spent = _whole(told.get("eval_count")), _whole(told.get("eval_duration"))
        if tokens and spent:
            self.finding.tokens_per_second = round(tokens / (spent / 1e9), 2)
        text = "".join(str(told.get(key) or "") for key in ("thinking", "response"))
        problem = judge_answer(text or None, tokens)
        return [problem] if problem else []

    def _check_vector(self) -> list[Fault]:
        vectors = self._ask("/api/embed", {"model": self._model, "input": PROMPT}).get("embeddings")
        vector = vectors[0] if isinstance(vectors, list) and vectors else None
        if isinstance(vector, list) and any(isinstance(number, (int, float)) and number for number in vector):
            return []
        message = "the vector of a sentence is empty, or has nothing but zeros"
        return [fault("empty_answer", self._model, message, self._look)]

    def _check_long_prompt(self) -> list[Fault]:
        """Whether the part that is OpenAI's shows the model a long prompt whole. It has no num_ctx to ask with."""
        wanted, limit = self.question.prompt_tokens_over, self._own_limit()
        if limit is not None:
            wanted = min(wanted, limit[0] * 3 // 4)
        if wanted <= 0 or self._makes_vectors():
            return []
        content = {
            "model": self._model,
            "messages": [{"role": "user", "content": long_prompt(wanted)}],
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
        }
        usage = self._ask("/v1/chat/completions", content).get("usage")
        self.finding.prompt_tokens = _whole(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
        seen = self.finding.prompt_tokens
        if seen is not None and seen > wanted:
            return []
        count = "an unknown number" if seen is None else str(seen)
        message = f"of a prompt of more than {wanted} tokens the model saw {count}, and the server reported no error"
        remedy = (
            "Clients of this endpoint cannot ask for a context: set OLLAMA_CONTEXT_LENGTH in the unit (role ollama: "
            "ollama_context_length), or num_ctx as a parameter of the model."
        )
        return [fault("ollama_prompt_cut", self._model, message, remedy)]

    # --- how long it stays -------------------------------------------------------------------------------------------

    def _check_keep_alive(self) -> list[Fault]:
        """Whether the model stays as long as the service was told. No request here asks for a time of its own."""
        if self.question.keep_alive is None:
            return []
        asked = seconds(self.question.keep_alive)
        if asked is None:
            message = f"{self.question.keep_alive!r} is no time"
            return [fault("setting_invalid", "keep_alive", message, "Write it like 30m, or -1 for ever.")]
        if asked == 0:
            return self._check_gone()
        entry = self._entry()
        left = remaining(entry) if entry else 0.0
        if entry:
            self.finding.expires_at = str(entry.get("expires_at"))
        if left is None:
            return [self._other_time("until an unknown time", asked)]
        if asked < 0:
            return [] if left > FOR_EVER_S else [self._other_time(f"for {left:.0f} s", asked)]
        return [] if abs(left - asked) <= max(10.0, asked / 20) else [self._other_time(f"for {left:.0f} s", asked)]

    def _check_gone(self) -> list[Fault]:
        # Loaded anew, so that the time is the service's own.
        self._client.unload(self._model)
        self._load()
        for _ in range(20):
            if self._entry() is None:
                return []
            self._sleep(0.25)
        entry = self._entry()
        return [self._other_time(f"for {remaining(entry) or 0:.0f} s", 0)] if entry else []

    def _other_time(self, found: str, asked: float) -> Fault:
        words = "for ever" if asked < 0 else f"for {asked:.0f} s"
        if self.finding.loaded_before and asked:
            message = (
                f"stays loaded {found} instead of {words}; another request had loaded it, and may have asked for that"
            )
            remedy = f"To see what the service does by itself: ollama stop {self._model}, and run this again."
            return fault("ollama_keep_alive_unproved", self._model, message, remedy)
        return fault(
            "ollama_keep_alive_differs",
            self._model,
            f"stays loaded {found} instead of {words}",
            "See which file sets OLLAMA_KEEP_ALIVE: systemctl cat ollama. The last one wins.",
        )


def weights_of(told: Mapping[str, Any]) -> str | None:
    """The first file that /api/show names as a model's weights; null where it names none."""
    found = re.search(r"^FROM +(\S.*)$", str(told.get("modelfile") or ""), re.MULTILINE)
    return found[1].strip() if found else None


def remaining(entry: Mapping[str, Any]) -> float | None:
    """Seconds that a model of /api/ps stays; null where that is not told."""
    # Go writes up to nine digits, Python 3.10 reads six.
    found = re.fullmatch(
        r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)", str(entry.get("expires_at") or "")
    )
    if not found:
        return None
    moment = datetime.fromisoformat(found[1] + found[2].replace("Z", "+00:00"))
    return (moment - datetime.now(timezone.utc)).total_seconds()


def long_prompt(tokens: int) -> str:
    """More tokens than that for any tokenizer; no two are alike at their beginning, where caches compare."""
    count = tokens + tokens // 8 + 64
    words: Sequence[str] = [WORDS[random.randrange(len(WORDS))] for _ in range(count)]
    return f"{' '.join(words)}\nReply with one word."


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
