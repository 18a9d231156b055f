# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Everything that can be judged before Ollama is downloaded: settings against release, driver, cards, port and folders.

Ollama passes over what it does not know and goes to the CPU without a word, so what it would pass over is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..addresses import address_of, is_loopback
from ..faults import Fault, FaultError
from ..machine import Machine, Runner, run
from ..nvidia.inventory import cuda_devices, loaded_version
from ..serving import memory
from ..serving.account import check_account
from ..serving.arguments import Surroundings, reachable_host, visible_gpus
from ..serving.clients import container_networks, containers_kept_out, networks, nobody_admitted, ruleset
from ..serving.dropins import drop_ins, lines_of, overridden
from ..serving.preparation import Prepared, check_address, check_port, rules_file
from ..serving.service import UNIT_FOLDER, Status, status
from ..serving.unit import load_timeout
from . import environment as variables
from . import folders, unit
from .catalogue import fault
from .names import parse_name
from .release import check_version
from .together import check_compat, check_models

BACKENDS = ("cuda", "cpu")
FLASH_ATTENTION = ("auto", "on", "off")
STATES = ("started", "stopped")
#: What `other_gpus` says of an engine that uses every card.
ALL = "all"
#: Libraries without code for cards older than this (v0.24.0 CMakePresets.json, "CUDA 13"); cuda_v12 has it from 5.0 on.
CUDA_13_FROM = (7, 5)
V12 = "cuda_v12"
#: File of variables with logins, which only root reads.
SECRETS = "secrets.env"
#: Where the vendor's service keeps its models: the home of its account.
VENDOR_STORE = "/usr/share/ollama/.ollama/models"
#: Seconds; a model that takes longer than a day does not load.
LONGEST_LOAD = 86400
#: What an origin may be (v0.24.0 hands them to gin-contrib/cors, which ends the server for others).
_ORIGIN = re.compile(r"(?:[a-z][a-z0-9+.-]*://[^\s,]+|[^\s,]*\*[^\s,]*)")


@dataclass(frozen=True)
class Settings:
    """What the operator states; see the options of module ollama_settings, whose names these are."""

    version: str = "0.24.0"
    user: str = "ollama"
    models_directory: str = f"{unit.HOME}/models"
    host: str = "127.0.0.1"
    port: int = 11434
    allowed_clients: Sequence[str] = ()
    open_to_network: bool = False
    backend: str = "cuda"
    gpus: Sequence[str] = ()
    other_gpus: Sequence[str] = ()
    llm_library: str = "auto"
    context_length: int = 8192
    num_parallel: int = 1
    keep_alive: str = "30m"
    load_timeout: int = 0
    device_timeout: int = 60
    max_loaded_models: int = 1
    max_queue: int = 512
    flash_attention: str = "auto"
    kv_cache_type: str = "f16"
    origins: Sequence[str] = ()
    no_cloud: bool = True
    environment: Mapping[str, Any] = field(default_factory=dict)
    models: Sequence[Mapping[str, Any]] = ()
    conflicts: Sequence[str] = ()
    state: str = "started"


@dataclass(frozen=True)
class Options:
    """What lies where beside the settings."""

    prefix: str = "/opt/ollama"
    folder: str = "/etc/ollama"
    guard: str = "/usr/local/lib/volta-llm/llama-server-guard"
    python: str = "/usr/bin/python3"
    unit_folder: Path = UNIT_FOLDER

    @property
    def binary(self) -> str:
        return f"{self.prefix}/current/bin/ollama"


@dataclass
class _Cards:
    """The machine's GPUs. ``visible`` is what CUDA_VISIBLE_DEVICES says, ``used`` are bus ids, null where not known."""

    around: Surroundings
    capabilities: dict[str, tuple[int, int]]
    pci_ids: dict[str, str]
    visible: list[str]
    used: tuple[str, ...] | None

    @property
    def in_use(self) -> tuple[str, ...]:
        """Bus ids of the cards in use, those of all where it is not known which."""
        return self.used if self.used is not None else self.around.gpu_bus_ids

    @property
    def old(self) -> bool:
        """Whether a card in use is too old for CUDA 13."""
        return any(self.capabilities.get(bus, CUDA_13_FROM) < CUDA_13_FROM for bus in self.in_use)


def prepare(
    settings: Settings,
    options: Options,
    gpu_machine: Machine,
    here: Machine | None = None,
    runner: Runner = run,
) -> Prepared:
    """Judge all of it, and compute what is to be written.

    ``gpu_machine`` is where GPUs are looked for (a simulator, perhaps), ``here`` where the server will listen.
    """
    here = here or Machine()
    cuda = settings.backend == "cuda"
    starts = settings.state == "started"
    faults = check_basics(settings)
    notes: list[str] = []
    version = variables.read_version(settings.version) or variables.LAST
    account_exists, account_faults = check_account(settings.user, example="ollama")
    faults += account_faults

    cards, gpu_faults = look_at_cards(settings, gpu_machine)
    faults += gpu_faults
    faults += check_disjoint(settings, cards)
    library, library_faults = choose_library(settings, cards)
    faults += library_faults
    kinds = [cards.pci_ids[bus] for bus in cards.in_use if bus in cards.pci_ids]
    driver = loaded_version(gpu_machine) if cuda else None
    compat_faults, compat_notes = check_compat(settings.version, driver, kinds, settings.models)
    faults += compat_faults
    notes += compat_notes

    faults += check_openness(settings)
    address_faults = check_address(settings.host)
    faults += address_faults
    admitted, client_faults = networks(settings.allowed_clients)
    faults += client_faults
    if not is_loopback(settings.host):
        faults += nobody_admitted(settings.host, admitted)
    filtered = bool(admitted) and not client_faults and not is_loopback(settings.host)
    if filtered:
        faults += containers_kept_out(admitted, container_networks(runner))
    rules = ruleset(unit.NAME, settings.port, admitted, "ollama") if filtered else ""

    given, variable_faults, variable_notes = variables.check(settings.environment, version, settings.version)
    faults += variable_faults
    notes += variable_notes
    limit = settings.load_timeout or max(600, load_timeout(largest(settings.models)))
    # Everybody reads units and their drop-ins, and they are shown where something is wrong with them.
    secret = {name: value for name, value in given.items() if variables.login(value)}
    environment = {name: value for name, value in given.items() if name not in secret}
    environment |= own_environment(settings, version, cards, library, limit)
    secrets_path = str(Path(options.folder) / SECRETS)
    if settings.no_cloud and not variables.knows(version, "OLLAMA_NO_CLOUD"):
        notes.append(f"Ollama {settings.version} has no OLLAMA_NO_CLOUD, and no models of the cloud either")

    place_faults = folders.check_place(settings.models_directory, options.prefix)
    faults += place_faults
    root_url = f"http://{reachable_host(settings.host)}:{settings.port}"
    wanted = unit.Unit(
        binary=options.binary,
        user=settings.user,
        environment=environment,
        unset=[name for name in owned_names(version) if name not in environment],
        guard=options.guard,
        python=options.python,
        root_url=root_url,
        port=settings.port,
        cuda=cuda,
        gpus=len(cards.in_use) or None,
        device_timeout=settings.device_timeout,
        writable=[str(settings.models_directory)],
        conflicts=settings.conflicts,
        ruleset=rules_file(options.folder, unit.NAME, rules) if rules else "",
        secrets=secrets_path if secret else "",
    )
    text = unit.drop_in(wanted)
    base, effective, unit_faults = look_at_unit(text, options, runner)
    faults += unit_faults
    if not place_faults:
        faults += folders.check_sandbox(settings.models_directory, effective, unit.DROPIN)
        account = folders.Account(settings.user, runner)
        faults += folders.check_reach(settings.models_directory, account)
        faults += folders.check_room(settings.models_directory, missing_bytes(settings))
        notes += other_store(settings.models_directory)
    if starts:
        faults += check_port(settings.host, settings.port, {unit.SERVICE}, here) if not address_faults else []
        held, said = check_held(settings, cards, gpu_machine, here) if cuda else ([], [])
        faults += held
        notes += said
    elif settings.models:
        notes.append(f"{unit.SERVICE} is not to run: models come when it does")
    notes.append(
        f"a loaded model has room for {settings.context_length * settings.num_parallel} tokens in all: "
        f"{settings.num_parallel} x {settings.context_length}"
    )
    rules_path = rules_file(options.folder, unit.NAME, rules) if rules else ""
    origins = {name: (value, origin) for name, (value, origin) in effective.environment.items() if name not in secret}
    origins |= {name: (value, unit.Origin(secrets_path, line)) for line, (name, value) in enumerate(secret.items(), 1)}
    unused = [str(path) for path in sorted(Path(options.folder).glob(f"{unit.NAME}-*.nft")) if str(path) != rules_path]
    unused += [secrets_path] if not secret and Path(secrets_path).exists() else []
    return Prepared(
        {
            "version": settings.version,
            "unit": base,
            "dropin": text,
            "dropin_path": str(options.unit_folder / f"{unit.SERVICE}.d" / unit.DROPIN),
            "binary": options.binary,
            "environment": {name: _shown(value) for name, value in {**environment, **secret}.items()},
            "effective_environment": [
                {"name": name, "value": _shown(value), "file": origin.path, "line": origin.line}
                for name, (value, origin) in sorted(origins.items())
            ],
            "files": [{"path": rules_path, "content": rules}] if rules else [],
            "absent_files": unused,
            "secrets_file": secrets_path if secret else None,
            "secret_names": list(secret),
            "conflicts": list(settings.conflicts),
            "client_filter": "nftables" if rules else None,
            "account_exists": account_exists,
            "home": unit.HOME,
            "root_url": root_url,
            "base_url": f"{root_url}/v1",
            "backend": settings.backend,
            "gpus": list(cards.used or ()),
            "gpu_count": len(cards.in_use) or None if cuda else None,
            "llm_library": library,
            "load_timeout": limit,
            "start_timeout": wanted.start_seconds + 30,
            "endpoints": endpoints(settings, f"{root_url}/v1"),
            "notes": notes,
        },
        faults,
    )


def _shown(value: str) -> str:
    """A value for results, without a login that an address in it may hold."""
    found = variables.login(value)
    return value.replace(found, "...@") if found else value


def _invalid(subject: str, message: str, remedy: str) -> Fault:
    return fault("setting_invalid", subject, message, remedy)


def check_basics(settings: Settings) -> list[Fault]:
    """Forms and ranges; the machine is not looked at."""
    faults: list[Fault] = []
    refused = check_version(settings.version)
    if refused is not None:
        faults.append(refused)
    else:
        version = variables.read_version(settings.version)
        if version is not None and version < variables.FIRST:
            first = ".".join(map(str, variables.FIRST))
            message = f"{settings.version} has no OLLAMA_CONTEXT_LENGTH, so that the context could not be set"
            faults.append(fault("ollama_version_invalid", "version", message, f"Write {first} or newer."))
    for subject, value, choices in (
        ("backend", settings.backend, BACKENDS),
        ("flash_attention", settings.flash_attention, FLASH_ATTENTION),
        ("kv_cache_type", settings.kv_cache_type, variables.CACHE_TYPES),
        ("state", settings.state, STATES),
    ):
        if value not in choices:
            faults.append(_invalid(subject, f"{value!r} is unknown", f"Write one of {', '.join(choices)}."))
    for subject, number, low, high in (
        ("port", settings.port, 1024, 65535),
        ("context_length", settings.context_length, 512, 1 << 24),
        ("num_parallel", settings.num_parallel, 1, 256),
        ("max_loaded_models", settings.max_loaded_models, 1, 256),
        ("max_queue", settings.max_queue, 1, 1 << 20),
        # 0 is "by size".
        ("load_timeout", settings.load_timeout, 0, LONGEST_LOAD),
        # 0 is "not at all".
        ("device_timeout", settings.device_timeout, 0, 3600),
    ):
        if not low <= number <= high:
            faults.append(_invalid(subject, f"{number} is out of range", f"Write a number from {low} to {high}."))
    if variables.seconds(settings.keep_alive) is None:
        faults.append(
            _invalid(
                "keep_alive",
                f"{settings.keep_alive!r} is no time, and Ollama would take 5 minutes instead",
                "Write it like 30m or 1h30m, 0 to unload at once, -1 to keep models for ever.",
            )
        )
    if settings.kv_cache_type not in ("", "f16") and settings.flash_attention != "on":
        faults.append(
            _invalid(
                "kv_cache_type",
                f"{settings.kv_cache_type} needs flash attention; Ollama would take f16 instead, as only its log says",
                "Write `flash_attention` on, or `kv_cache_type` f16.",
            )
        )
    for origin in map(str, settings.origins):
        if not _ORIGIN.fullmatch(origin):
            faults.append(
                _invalid(
                    "origins",
                    f"{origin!r} is no origin, and Ollama would not start",
                    "Write them like https://chat.example.org or http://192.168.1.5:*, one an element.",
                )
            )
    for conflict in map(str, settings.conflicts):
        if not re.fullmatch(r"[A-Za-z0-9:_.\\@-]+\.service", conflict) or conflict == unit.SERVICE:
            faults.append(
                _invalid("conflicts", f"{conflict!r} names no other service", "Write units, as llama-server.service.")
            )
    for number, model in enumerate(settings.models):
        if model.get("size") and _bytes(model) is None:
            message = f"size {model['size']!r} is no whole number"
            faults.append(_invalid(f"models[{number}]", message, "Write the bytes of all its blobs, as 5225388164."))
    if settings.host != "localhost" and address_of(settings.host) is None:
        faults.append(
            _invalid(
                "host",
                f"{settings.host!r} is not an address",
                "Write 127.0.0.1, an address of this machine, or 0.0.0.0 for all of them (IPv6 without brackets).",
            )
        )
    return faults + check_models(settings.models)


def check_openness(settings: Settings) -> list[Fault]:
    """Who reaches Ollama can use it, load what it has, and remove it: it asks nobody for a key."""
    if is_loopback(settings.host) or settings.allowed_clients or settings.open_to_network:
        return []
    if address_of(settings.host) is None:
        return []
    return [
        fault(
            "ollama_open_to_network",
            "host",
            f"{settings.host} is reachable from other machines, and Ollama has no API key: anyone could use, load and "
            "delete models",
            "Name the clients' networks in `allowed_clients`, as in [192.168.10.0/24], write 127.0.0.1, or, where a "
            "firewall or a gateway stands before it, `open_to_network`: true.",
        )
    ]


def look_at_cards(settings: Settings, machine: Machine) -> tuple[_Cards, list[Fault]]:
    """The machine's GPUs, and which of them are to be used."""
    if settings.backend == "cpu":
        faults = []
        if settings.gpus:
            faults.append(_invalid("backend", "cpu uses no GPU, but `gpus` is set", "Remove `gpus`."))
        return _Cards(Surroundings(), {}, {}, [], ()), faults
    found, others = cuda_devices(machine)
    devices = {device.bus_id: device for device in found}
    around = Surroundings(gpu_bus_ids=tuple(devices), gpu_uuids=memory.uuids_of(machine), gpu_others=others)
    visible, used, faults = visible_gpus(settings.gpus, around)
    if used is not None and all(bus in around.gpu_uuids for bus in used):
        # An index is another card once one has failed.
        visible = [around.gpu_uuids[bus] for bus in used] if settings.gpus else []
    if not devices:
        faults.append(
            _invalid(
                "backend",
                "cuda, and there is no NVIDIA GPU on the machine's PCI bus: Ollama would be on the CPU",
                "Look with `lspci -d 10de:`; a machine that is to do without writes `backend`: cpu.",
            )
        )
    capabilities = {}
    for bus, device in devices.items():
        numbers = re.fullmatch(r"(\d+)\.(\d+)", device.compute_capability or "")
        if numbers:
            capabilities[bus] = (int(numbers[1]), int(numbers[2]))
    pci_ids = {bus: device.pci_id.removeprefix("10de:") for bus, device in devices.items()}
    return _Cards(around, capabilities, pci_ids, visible, used), faults


def check_disjoint(settings: Settings, cards: _Cards) -> list[Fault]:
    """Another engine that runs at the same time must have other cards."""
    if not settings.other_gpus or settings.backend == "cpu":
        return []
    names = [str(name) for name in settings.other_gpus]
    remedy = "Give each engine cards of its own, or run one at a time (`state` of the other: stopped)."
    if ALL in names:
        message = "the other engine uses all GPUs"
        return [fault("engines_share_gpu", "other_gpus", message, remedy)]
    _, others, _ = visible_gpus(names, cards.around)
    if others is None or cards.used is None:
        shared = sorted({str(name).lower() for name in settings.gpus} & {name.lower() for name in names})
        if settings.gpus and not shared:
            return []
    else:
        shared = sorted(set(others) & set(cards.used))
    if shared or not settings.gpus:
        what = f"{', '.join(shared)} {'is' if len(shared) == 1 else 'are'}" if shared else "all GPUs here are"
        subject = "gpus" if settings.gpus else "other_gpus"
        return [fault("engines_share_gpu", subject, f"{what} used by the other engine as well", remedy)]
    return []


def choose_library(settings: Settings, cards: _Cards) -> tuple[str | None, list[Fault]]:
    """OLLAMA_LLM_LIBRARY: the folder below lib/ollama whose libraries are used; null leaves it to Ollama.

    Ollama passes over all other folders then (v0.24.0 discover/runner.go), also over one that only seems to suit.
    """
    asked = settings.llm_library
    if settings.backend == "cpu":
        if asked in ("auto", "cpu"):
            return "cpu", []
        return None, [_invalid("llm_library", f"{asked} on a machine without GPUs", "Write auto.")]
    if asked == "auto":
        return V12 if cards.old else None, []
    if not re.fullmatch(r"cuda_v\d+", asked):
        return None, [_invalid("llm_library", f"{asked!r} is no library for NVIDIA GPUs", "Write auto, or cuda_v12.")]
    if cards.old and int(asked.removeprefix("cuda_v")) >= 13:
        lowest = min(cards.capabilities[bus] for bus in cards.in_use if bus in cards.capabilities)
        message = f"{asked} has no code for compute capability {lowest[0]}.{lowest[1]}"
        return None, [fault("ollama_library_unusable", "llm_library", message, f"Write auto, or {V12}.")]
    return asked, []


def largest(models: Sequence[Mapping[str, Any]]) -> int | None:
    """Bytes of the largest model as far as it is stated, or lies here as a file; null where nothing is known.

    What the store has is not looked at: the settings would be others before and after the first pull.
    """
    sizes = []
    for model in models:
        size = _bytes(model)
        path = Path(str(model.get("gguf") or "/nonexistent"))
        if size:
            sizes.append(size)
        elif path.is_file():
            sizes.append(path.stat().st_size)
    return max(sizes, default=None)


def _bytes(model: Mapping[str, Any]) -> int | None:
    """What is stated as a model's size; null for none, or for what is no number."""
    text = str(model.get("size") or "")
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def missing_bytes(settings: Settings) -> int:
    """What models that are not in the store yet will take, as far as it is known. A model from a file of the same file
    system takes no second time what is there."""
    total = 0
    for model in settings.models:
        try:
            name = parse_name(str(model.get("name") or ""))
        except FaultError:
            continue
        if (Path(settings.models_directory) / name.below).is_file():
            continue
        gguf = str(model.get("gguf") or "")
        if gguf and any(folders.same_file_system(settings.models_directory, [gguf])):
            continue
        total += largest([model]) or 0
    return total


def other_store(directory: str) -> list[str]:
    """A word on models that a vendor's installation has elsewhere."""
    if Path(directory) == Path(VENDOR_STORE) or (Path(directory) / "manifests").is_dir():
        return []
    if not (Path(VENDOR_STORE) / "manifests").is_dir():
        return []
    return [f"{VENDOR_STORE} has models that this service will not see; docs/ollama.md says how to move them"]


def own_environment(
    settings: Settings, version: variables.Version, cards: _Cards, library: str | None, limit: int
) -> dict[str, str]:
    """The variables that settings stand for."""
    address = address_of(settings.host)
    host = f"[{address}]" if address is not None and address.version == 6 else settings.host
    found = {
        "HOME": unit.HOME,
        "OLLAMA_HOST": f"{host}:{settings.port}",
        "OLLAMA_MODELS": settings.models_directory,
        # Ollama takes 262144 tokens of itself on large cards.
        "OLLAMA_CONTEXT_LENGTH": str(settings.context_length),
        "OLLAMA_NUM_PARALLEL": str(settings.num_parallel),
        "OLLAMA_KEEP_ALIVE": settings.keep_alive,
        "OLLAMA_LOAD_TIMEOUT": f"{limit}s",
        "OLLAMA_MAX_LOADED_MODELS": str(settings.max_loaded_models),
        "OLLAMA_MAX_QUEUE": str(settings.max_queue),
        "OLLAMA_KV_CACHE_TYPE": settings.kv_cache_type,
    }
    if settings.flash_attention in ("on", "off"):
        found["OLLAMA_FLASH_ATTENTION"] = "true" if settings.flash_attention == "on" else "false"
    if settings.origins:
        found["OLLAMA_ORIGINS"] = ",".join(map(str, settings.origins))
    if settings.no_cloud:
        found["OLLAMA_NO_CLOUD"] = "true"
    if library:
        found["OLLAMA_LLM_LIBRARY"] = library
    if settings.backend == "cuda":
        # CUDA numbers cards by speed otherwise, and not as nvidia-smi does.
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if cards.visible:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(cards.visible)
    else:
        found["CUDA_VISIBLE_DEVICES"] = "-1"
    return {name: value for name, value in found.items() if name == "HOME" or variables.knows(version, name)}


def owned_names(version: variables.Version) -> list[str]:
    """Variables that a setting stands for, in this release."""
    return [variable.name for variable in variables.VARIABLES if variable.owner and variable.known_to(version)]


def check_held(settings: Settings, cards: _Cards, gpu_machine: Machine, here: Machine) -> tuple[list[Fault], list[str]]:
    """Who else is on the cards. What units of ours hold that give way to this one is about to be given back."""
    shown = memory.cards_of(gpu_machine)
    if not shown:
        return [], ["nvidia-smi names no GPU: who else uses them was not looked at"]
    own: Collection[str] = {unit.SERVICE, *settings.conflicts}
    used = memory.chosen(shown, cards.used if settings.gpus else None)
    return memory.foreign(memory.holders_of(gpu_machine), used, own, here), []


def look_at_unit(text: str, options: Options, runner: Runner) -> tuple[str | None, unit.Effective, list[Fault]]:
    """The unit file to write (null: there is one of others), what all files say together, and what is wrong with them.

    ``text`` is that of our drop-in, as it will be.
    """
    ours = options.unit_folder / f"{unit.SERVICE}.d" / unit.DROPIN
    own_file = options.unit_folder / unit.SERVICE
    faults: list[Fault] = []
    try:
        now: Status | None = status(unit.SERVICE, runner)
    except FaultError as exc:
        now, faults = None, [exc.fault]
    fragment = now.fragment if now is not None else ""
    if own_file.is_symlink() and own_file.readlink() == Path("/dev/null"):
        message = f"links to /dev/null: {unit.SERVICE} is masked and cannot be started"
        faults.append(fault("unit_overridden", str(own_file), message, f"systemctl unmask {unit.SERVICE}"))
        fragment = ""
    # One that was put there since systemd looked last.
    if not fragment and own_file.is_file():
        fragment = str(own_file)
    content = _read(fragment)
    base = unit.base() if content is None or content.startswith(unit.MARK) else None
    beside = [path for path in drop_ins(own_file, now.drop_ins if now is not None else ()) if path != str(ours)]
    faults += overridden(unit.SERVICE, text, beside, unit.DROPIN, "`environment`")
    if content is not None and fragment == str(own_file):
        faults += _edited(fragment, content, text)
    files = unit.in_order(fragment if content is not None else str(own_file), [*beside, str(ours)])
    texts = {str(ours): text}
    if base is not None:
        texts[files[0]] = base
    return base, unit.effective((path, texts.get(path) or _read(path) or "") for path in files), faults


def _edited(path: str, content: str, ours: str) -> list[Fault]:
    """A warning for a unit file of the vendor's form that somebody has written into."""
    lines = unit.edited(content)
    if not lines:
        return []
    said = {line.key for line in lines_of(ours)}
    names = {name for line in lines_of(ours) if line.key == "Environment" for name, _ in line.variables()}
    unset = {name for line in lines_of(ours) if line.key == "UnsetEnvironment" for name in line.value.split()}
    told = []
    for line in lines:
        if line.key == "Environment":
            told += [
                f"line {line.number}: {name} ({'set by our settings' if name in names | unset else 'in force'})"
                for name, _ in line.variables()
            ]
        else:
            told.append(f"line {line.number}: {line.key} ({'set by our settings' if line.key in said else 'in force'})")
    message = f"was edited by hand and is left as it is; {', '.join(told)}"
    remedy = (
        f"Put what is in force into `environment` or a drop-in of its own: the vendor's script writes {path} anew, and "
        "edits are lost."
    )
    return [fault("ollama_unit_edited", path, message, remedy)]


def endpoints(settings: Settings, base_url: str) -> list[dict[str, Any]]:
    """One for each model, in the form of module llama_server_arguments (its result C(servers)); there is no key."""
    return [
        {
            "name": unit.NAME,
            "alias": str(model.get("name") or ""),
            "base_url": base_url,
            "host": settings.host,
            "context_per_request": settings.context_length,
            "parallel": settings.num_parallel,
            "has_keys": False,
            "api_key_file": "",
        }
        for model in settings.models
    ]


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace") if path else None
    except OSError:
        return None
