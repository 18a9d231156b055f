# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Everything that can be judged before a server is started: settings against engine, model, GPUs and port."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import socket
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..addresses import address_of, is_loopback
from ..engine.capabilities import parse_help
from ..faults import Fault
from ..machine import Machine, Runner, run
from ..nvidia.inventory import cuda_devices
from . import calibration, maintenance, memory, model_file
from .account import check_account
from .arguments import COPY_NAMES, Plan, Settings, Surroundings, cleaned, option_of, plan, printable, root_url
from .catalogue import CATALOGUE
from .clients import (
    Network,
    container_networks,
    containers_kept_out,
    networks,
    nobody_admitted,
    ruleset,
    systemd_filters,
)
from .handover import check_advertised
from .instances import Server, collisions, key_file, leftover_units, named, servers
from .listener import in_the_way, listeners, unit_of
from .mapped import all_shards
from .model_file import ModelFacts, unverified
from .service import COMMAND_TIMEOUT, UNIT_FOLDER
from .unit import Unit, load_timeout, render

#: What an engine without OpenSSL says of TLS (LC tools/server/server-http.cpp:174); it is in such a program.
WITHOUT_TLS = b"built without SSL support"

#: Of each server's results what its settings say, which the caller of a single one knows.
GIVEN = ("name", "instance", "host", "port", "backend", "parallel", "api_key_file", "context_wanted")
#: Seconds; a model that takes longer than a day does not load.
SHORTEST_LOAD, LONGEST_LOAD = 1, 86400
ENGINE_REMEDY = "Build it again with role llama_cpp."
#: What the engine says of an option at the end of its arguments that wants one more.
_LACKING = re.compile(r"handling argument \"?(-[^\s\":]+)\"?: expected value")


@dataclass(frozen=True)
class UnitOptions:
    """What the units say beside the command; ``load_timeout`` 0 takes it from the model's size.

    ``client_filter`` is one of clients.FILTERS. ``folder`` holds what belongs to the units beside the keys.
    """

    name: str = "llama-server"
    user: str = "llama-server"
    load_timeout: int = 0
    guard: str = "/usr/local/lib/volta-llm/llama-server-guard"
    python: str = "/usr/bin/python3"
    client_filter: str = "auto"
    folder: str = "/etc/llama-server"
    allow_unverified_model: bool = False
    advertised_host: str = ""
    maintenance_restart: str = ""
    maintenance_patience: int = 1800
    unit_folder: Path = UNIT_FOLDER


@dataclass(frozen=True)
class Prepared:
    results: dict[str, Any]
    faults: list[Fault]


@dataclass(frozen=True)
class Engine:
    """``flags`` is empty and ``version`` null where the engine does not say; ``missing`` when it is not there."""

    flags: frozenset[str] = frozenset()
    version: str | None = None
    missing: bool = False


@dataclass
class Ground:
    """What all servers of a machine stand on; each thing is looked at once, and only where a server needs it.

    ``gpu_machine`` is where GPUs are looked for (a simulator, perhaps), ``here`` where the servers will listen.
    """

    gpu_machine: Machine
    here: Machine
    runner: Runner
    check: bool
    own_units: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    _engines: dict[str, tuple[Engine, list[Fault]]] = field(default_factory=dict)

    def engine(self, binary: str) -> tuple[Engine, list[Fault]]:
        if binary not in self._engines:
            self._engines[binary] = inspect_engine(binary, self.runner)
        return self._engines[binary]

    @cached_property
    def gpus(self) -> tuple[tuple[str, ...], str | None, dict[str, str]]:
        return inspect_gpus(self.gpu_machine)

    @cached_property
    def uuids(self) -> Mapping[str, str]:
        return memory.uuids_of(self.gpu_machine)

    @cached_property
    def cards(self) -> list[memory.Card]:
        return memory.cards_of(self.gpu_machine)

    @cached_property
    def holders(self) -> list[memory.Holder]:
        return memory.holders_of(self.gpu_machine)

    @cached_property
    def giving_way(self) -> frozenset[str]:
        """Units on the cards that systemd stops when a server of ours is started (Conflicts=, from either side)."""
        units = {unit_of(self.here, holder.pid) for holder in self.holders} - {None, *self.own_units}
        found = set()
        for unit in filter(None, units):
            shown = self.runner(["systemctl", "show", unit, "--property=Conflicts,ConflictedBy"], COMMAND_TIMEOUT)
            if shown.ok and self.own_units & set(re.split(r"[\s=]+", shown.stdout)):
                found.add(unit)
        return frozenset(found)

    @cached_property
    def container_networks(self) -> Mapping[str, Sequence[Network]]:
        return container_networks(self.runner)

    @cached_property
    def systemd_filters(self) -> bool:
        return systemd_filters(self.runner)


def prepare(
    settings: Settings,
    options: UnitOptions,
    gpu_machine: Machine,
    check: bool = False,
    here: Machine | None = None,
    runner: Runner = run,
    instances: Sequence[Mapping[str, Any]] = (),
) -> Prepared:
    """Judge all of it, for the default server and the named ``instances``. Results are those of the default server, and
    all servers' in ``servers``.

    In check mode engine and model may be missing: nothing installed them.
    """
    options, faults = _cleaned(options)
    wanted, server_faults = servers(settings, instances)
    faults += server_faults
    for at, server in enumerate(wanted):
        # Once, and before any of it is looked for: no file has such a name.
        own, control = cleaned(server.settings)
        wanted[at] = replace(server, settings=own)
        faults += named(server, control)
    leaving = leftover_units(options.unit_folder, options.name, [server.unit for server in wanted])
    ground = Ground(
        gpu_machine,
        here or Machine(),
        runner,
        check,
        own_units=frozenset([*(server.service for server in wanted), *(f"{unit}.service" for unit in leaving)]),
        leaving=frozenset(f"{unit}.service" for unit in leaving),
    )
    faults += check_advertised(options.advertised_host)
    account_exists, account_faults = check_account(options.user)
    faults += account_faults
    if options.load_timeout and not SHORTEST_LOAD <= options.load_timeout <= LONGEST_LOAD:
        message = f"{options.load_timeout} is out of range"
        remedy = f"Write seconds, {SHORTEST_LOAD} to {LONGEST_LOAD}, or 0 to take it from the model's size."
        faults.append(CATALOGUE.fault("setting_invalid", "load_timeout", message, remedy))
    planned: list[tuple[Server, Plan]] = []
    results: list[dict[str, Any]] = []
    for server in wanted:
        # Two of ours that want one port are told so together, not each that the other is in the way.
        alike = {other.service for other in wanted if other.settings.port == server.settings.port}
        prepared, computed = _prepare_one(server, options, ground, alike)
        faults += named(server, prepared.faults)
        planned.append((server, computed))
        results.append(prepared.results)
    faults += collisions(planned)
    faults += maintenance.check(options.maintenance_restart, options.maintenance_patience, results)
    files, absent = _files(options, results, leaving)
    return Prepared(
        {
            **{key: value for key, value in results[0].items() if key not in GIVEN},
            "account_exists": account_exists,
            "servers": results,
            "leftover_units": leaving,
            "files": [{"path": path, "content": content} for path, content in files.items()],
            "absent_files": absent,
            "maintenance_timer": maintenance.timer(options.name),
            "maintenance_installed": (UNIT_FOLDER / maintenance.timer(options.name)).exists(),
            "would_verify": any(result["would_verify"] for result in results),
        },
        faults,
    )


def _cleaned(options: UnitOptions) -> tuple[UnitOptions, list[Fault]]:
    """As arguments.cleaned, for what the units say beside the command."""
    faults: list[Fault] = []
    # The folder is that of the key file, which is judged with the settings.
    clean: dict[str, Any] = {"folder": printable("api_key_file", options.folder, [])}
    clean |= {name: printable(name, getattr(options, name), faults) for name in ("name", "guard", "python")}
    return replace(options, **clean), faults


def _files(
    options: UnitOptions, results: Sequence[Mapping[str, Any]], leaving: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Contents by path of what lies beside the units, and what must not be there (any more)."""
    files = {
        rules_file(options.folder, server["name"], server["client_rules"]): str(server["client_rules"])
        for server in results
        if server["client_rules"]
    }
    # A glob: rules that former settings made lie there under names of their own.
    unused = [str(path) for path in sorted(Path(options.folder).glob(f"{options.name}*.nft")) if str(path) not in files]
    unused += [key_file(f"{options.folder}/api-keys", unit.partition("@")[2]) for unit in leaving]
    if options.maintenance_restart:
        at, patience = options.maintenance_restart, options.maintenance_patience
        files |= maintenance.files(at, patience, options.name, options.folder, options.guard, options.python, results)
    else:
        unused += maintenance.paths(options.name, options.folder)
    return files, unused


def read_files(settings: Settings) -> list[str]:
    """Paths that the server goes through: those of its program, the model and files that further arguments name, and
    where links on the way lead."""
    given = [settings.binary, *all_shards(settings.model), *named_paths(settings)]
    return list(dict.fromkeys(step for path in given for step in _steps(path)))


def _steps(path: str) -> list[str]:
    """A path as it is written, as it is after each link in it, and the end of them all."""
    steps = [os.path.normpath(path)]
    with contextlib.suppress(OSError):
        # As many links as Linux follows.
        for _ in range(40):
            whole = Path(steps[-1])
            link = next((at for at in [*reversed(whole.parents), whole] if at.is_symlink()), None)
            if link is None:
                break
            steps.append(os.path.normpath(link.parent / link.readlink() / whole.relative_to(link)))
    return [*steps, os.path.realpath(path)]


def named_paths(settings: Settings) -> list[str]:
    """Paths that further arguments name, such as a chat template, a LoRA adapter or a projector."""
    named = [str(word).partition("=")[2] or str(word) for word in settings.extra_args]
    return [word for word in named if word.startswith("/")]


def rules_file(folder: str, unit: str, rules: str) -> str:
    """Where rules for clients lie. Others have another name, so that a former unit that comes back has those it had."""
    return f"{folder}/{unit}-{hashlib.sha256(rules.encode()).hexdigest()[:12]}.nft"


def _prepare_one(server: Server, options: UnitOptions, ground: Ground, alike: Collection[str]) -> tuple[Prepared, Plan]:
    settings, cuda = server.settings, server.settings.backend == "cuda"
    faults: list[Fault] = []
    engine, engine_faults = ground.engine(settings.binary)
    faults += engine_faults
    model, model_faults = model_file.inspect(settings.model)
    faults += model_faults
    if not model_faults and not options.allow_unverified_model:
        faults += unverified(all_shards(settings.model))
    absent = ("engine_missing", "gguf_not_found")
    would_verify = ground.check and any(fault.code in absent for fault in faults)
    if ground.check:
        faults = [fault for fault in faults if fault.code not in absent]

    bus_ids, gpu, other_gpus = ground.gpus if cuda else ((), None, {})
    computed = plan(
        settings,
        Surroundings(
            flags=engine.flags,
            engine_version=engine.version,
            architecture=model.architecture,
            model_context=model.context,
            gpu_bus_ids=bus_ids,
            gpu_others=other_gpus,
            gpu=gpu,
            gpu_uuids=ground.uuids if cuda else {},
        ),
    )
    faults += computed.faults
    notes = list(computed.notes)
    faults += check_tls(settings, engine, ground.check)
    if not computed.faults and not engine.missing:
        faults += parse_by_engine(settings, computed, ground.runner)
    faults += check_port(settings.host, settings.port, {*alike, *ground.leaving}, ground.here)
    faults += check_address(settings.host)
    admitted, client_filter, client_faults = _clients(settings, options, ground)
    faults += client_faults
    if client_filter:
        faults += containers_kept_out(admitted or [], ground.container_networks)
    elif is_loopback(settings.host) and ground.container_networks:
        notes.append(
            f"containers on this machine ({', '.join(ground.container_networks)}) cannot reach {settings.host}: within "
            "one that is the container itself"
        )
    rules = ruleset(server.unit, settings.port, admitted) if client_filter == "nftables" and admitted else ""

    limit = options.load_timeout or load_timeout(model.size)
    url = root_url(settings)
    text = render(
        Unit(
            name=server.unit,
            description=f"llama-server: {computed.alias} on port {settings.port}",
            user=options.user,
            group=options.user,
            argv=computed.argv,
            environment=computed.environment,
            guard=options.guard,
            python=options.python,
            health_url=f"{url}/health",
            port=settings.port,
            load_timeout=limit,
            cuda=cuda,
            gpus=len(bus_ids) or None,
            paths=read_files(settings),
            limit_memlock=any("mlock" in word for word in map(str, settings.extra_args)),
            copies=_copied(settings),
            admitted=None if admitted is None or rules else by_systemd(settings.host, admitted),
            ruleset=rules_file(options.folder, server.unit, rules) if rules else "",
        )
    )
    counted: list[dict[str, Any]] = []
    if cuda:
        unchanged = _is_in_place(options.unit_folder / server.service, text)
        held, counted, said = _memory(settings, computed, model, engine, ground, unchanged)
        faults += held
        notes += said
    return (
        Prepared(
            {
                "name": server.unit,
                "instance": server.instance,
                "argv": list(computed.argv),
                "environment": computed.environment,
                "unit": text,
                "model_files": all_shards(settings.model),
                "argument_files": [path for path in named_paths(settings) if _is_file(path)],
                "tls_files": sorted(_copied(settings).values()),
                "alias": computed.alias,
                "base_url": computed.base_url,
                "host": settings.host,
                "port": settings.port,
                "backend": settings.backend,
                "parallel": settings.parallel,
                "has_keys": bool(settings.api_keys),
                "api_key_file": settings.api_key_file,
                "metrics": "--metrics" in computed.argv,
                "split_mode": computed.split_mode,
                "gpu_count": computed.gpu_count,
                "gpus": list(computed.gpus) if computed.gpus else [],
                "memory": counted,
                "context_wanted": settings.context_per_request,
                "context_per_request": computed.context,
                "total_context": computed.total_context,
                "architecture": model.architecture,
                "engine_version": engine.version,
                "load_timeout": limit,
                "client_filter": client_filter,
                "client_rules": rules,
                "notes": notes,
                "would_verify": would_verify,
            },
            faults,
        ),
        computed,
    )


def _is_in_place(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except OSError:
        return False


def _memory(
    settings: Settings, computed: Plan, model: ModelFacts, engine: Engine, ground: Ground, unchanged: bool
) -> tuple[list[Fault], list[dict[str, Any]], list[str]]:
    """Who else is on the cards, what each of them will hold, and notes.

    The engine is asked only where something is to change: it opens each card for it, which takes some hundred MiB that
    a server at work may need just then.
    """
    if not ground.cards:
        return [], [], ["nvidia-smi names no GPU: what the model takes of each was not compared with what there is"]
    if settings.gpus and computed.gpus is None:
        return [], [], ["the cards in `gpus` could not be told apart: memory was not compared"]
    used = memory.chosen(ground.cards, computed.gpus)
    faults = memory.foreign(ground.holders, used, ground.own_units | ground.giving_way, ground.here)
    if model.header is None or computed.faults or not used:
        return faults, [], []
    folder = None if engine.missing or unchanged else str(Path(settings.binary).resolve().parent)
    short = calibration.shortfall(Path(calibration.FILE))
    counted = memory.count(settings, computed, model.header, used, folder, ground.runner, short)
    return faults + counted.faults, counted.per_gpu, counted.notes


def _clients(
    settings: Settings, options: UnitOptions, ground: Ground
) -> tuple[list[Network] | None, str | None, list[Fault]]:
    """The networks that are let in (null: no filter is asked for), and by what: systemd, nftables or nothing."""
    admitted, faults = networks(settings.allowed_clients)
    if is_loopback(settings.host):
        # Nobody else reaches the address. systemd, where it can, also keeps the server from reaching anybody.
        elsewhere = any(option_of(str(word)) == "--rpc" for word in settings.extra_args)
        return None if elsewhere else [], None, faults
    faults += nobody_admitted(settings.host, admitted)
    if faults or not admitted:
        return None, None, faults
    if options.client_filter == "nftables" or (options.client_filter == "auto" and not ground.systemd_filters):
        return admitted, "nftables", faults
    if not ground.systemd_filters:
        message = "systemd on this machine starts units without the address filter that they ask for"
        remedy = "Write `client_filter` auto or nftables."
        faults.append(CATALOGUE.fault("clients_not_enforced", "allowed_clients", message, remedy))
    return admitted, "systemd", faults


def by_systemd(host: str, admitted: Sequence[Network]) -> list[str]:
    """What systemd must let through. A server that is bound to one address is asked there by this machine as well, from
    that address, which is not loopback."""
    found = [str(network) for network in admitted]
    address = address_of(host.partition("%")[0])
    if address is not None and not address.is_loopback and not address.is_unspecified:
        found.append(str(ipaddress.ip_network(address)))
    return found


def _copied(settings: Settings) -> dict[str, str]:
    """The files of ``tls`` by the name of the copy that the server reads."""
    return {name: str(settings.tls[of]) for of, name in COPY_NAMES.items() if settings.tls.get(of)}


def check_tls(settings: Settings, engine: Engine, check: bool = False) -> list[Fault]:
    """Whether the files belong together and the engine can use them. In check mode they may be missing."""
    if not settings.tls:
        return []

    def refuse(message: str, remedy: str) -> list[Fault]:
        return [CATALOGUE.fault("tls_unusable", "tls", message, remedy)]

    certificate, key = (str(settings.tls.get(name) or "") for name in ("certificate", "key"))
    if set(settings.tls) != {"certificate", "key"} or not (certificate.startswith("/") and key.startswith("/")):
        return refuse(
            "it must have certificate and key, both paths from the root on the machine",
            "Write {certificate: /etc/ssl/server.pem, key: /etc/ssl/private/server.key}.",
        )
    missing = [path for path in (certificate, key) if not _is_file(path)]
    if missing:
        text = (
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there, or in a folder that is closed"
        )
        return [] if check else refuse(text, "Bring the files to the machine before this role runs.")
    asked = []

    def no_pass_phrase() -> str:
        # Without this OpenSSL asks at the terminal, and waits.
        asked.append(key)
        return ""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, no_pass_phrase)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", None) or exc.strerror if isinstance(exc, OSError) else str(exc)
        if asked:
            reason = "the key has a pass phrase, which nobody is there to type"
        return refuse(
            f"{certificate} and {key} cannot be used together ({reason})",
            "Give a certificate (with its chain) and its own key as PEM, the key without a pass phrase.",
        )
    if not engine.missing and _without_tls(Path(settings.binary)):
        return refuse(
            f"{settings.binary} was built without OpenSSL",
            "Build it again with role llama_cpp on a machine that has libssl-dev.",
        )
    return []


def _is_file(path: str | Path) -> bool:
    """Whether there is a file, as far as can be seen; a folder that is closed to us raises nothing."""
    try:
        return Path(path).is_file()
    except OSError:
        return False


def _without_tls(binary: Path) -> bool:
    """Whether program or libraries hold the words with which an engine refuses TLS."""
    folder = binary.resolve().parent
    for path in [binary, *sorted(folder.glob("*.so*")), *sorted((folder.parent / "lib").glob("*.so*"))]:
        # Large libraries hold kernels for GPUs, not the server.
        with contextlib.suppress(OSError):
            if path.stat().st_size < 256_000_000 and WITHOUT_TLS in path.read_bytes():
                return True
    return False


def inspect_engine(binary: str, runner: Runner = run) -> tuple[Engine, list[Fault]]:
    """What the installed engine can do: from the manifest of its release, else from its help text."""
    program = Path(binary)
    if not os.access(program, os.X_OK) or not _is_file(program):
        remedy = "Build it with role llama_cpp, or correct `binary`."
        return Engine(missing=True), [CATALOGUE.fault("engine_missing", binary, "no such program", remedy)]
    manifest = _manifest(program)
    version = manifest.get("version")
    known = manifest.get("capabilities")
    flags = known.get("flags") if isinstance(known, dict) else None
    if not isinstance(flags, list) or not flags:
        done = runner([binary, "--help"], 60.0)
        if not done.ok:
            what = done.stderr.strip()[-300:] or ("no answer in time" if done.timed_out else f"exit status {done.rc}")
            message = f"does not run: {what}"
            return Engine(missing=True), [CATALOGUE.fault("engine_missing", binary, message, ENGINE_REMEDY)]
        flags = parse_help(done.stdout).flags
    return Engine(frozenset(map(str, flags)), str(version) if version else None), []


def _manifest(program: Path) -> dict[str, Any]:
    """release.json of the release that the program belongs to (bin/ lies beside it); empty where there is none."""
    try:
        content = json.loads((program.resolve().parent.parent / "release.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def inspect_gpus(machine: Machine) -> tuple[tuple[str, ...], str | None, dict[str, str]]:
    """Bus ids of the GPUs that CUDA counts, in its order, their device id if all are alike, and why not the others."""
    devices, others = cuda_devices(machine)
    kinds = {device.pci_id for device in devices}
    kind = kinds.pop().removeprefix("10de:") if len(kinds) == 1 else None
    return tuple(device.bus_id for device in devices), kind, others


def parse_by_engine(settings: Settings, computed: Plan, runner: Runner = run) -> list[Fault]:
    """Let the engine parse the arguments. With --help in front it parses all of them, prints the help and ends.

    Behind them an option that lacks its value would take the word, and the engine would serve (LC common/arg.cpp,
    common_params_parse_ex). --version in front ends at once, with nothing parsed.
    """
    program, *words = computed.trial
    done = runner([program, "--help", *words], 60.0)
    if done.ok:
        return []
    if done.missing or done.timed_out or "error while loading shared libraries" in done.stderr:
        # Its options are known from the release's manifest; that it starts is seen here.
        return [CATALOGUE.fault("engine_missing", settings.binary, f"does not run: {done.why}", ENGINE_REMEDY)]
    lacking = _LACKING.search(done.stderr + done.stdout)
    if lacking:
        message = f"{lacking[1]} lacks a value"
        remedy = "Write option and value as two elements; the service was not touched."
        return [CATALOGUE.fault("argument_refused", "extra_args", message, remedy)]
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
    message = lines[0].strip() if lines else done.stderr.strip()[-300:] or f"exit status {done.rc}"
    remedy = "Correct the setting that the engine names; the service was not touched."
    return [CATALOGUE.fault("argument_refused", Path(settings.binary).name, message, remedy)]


def check_address(host: str) -> list[Fault]:
    """Whether the machine has the address, by binding to it; what is no address at all is judged with the settings."""
    try:
        # No name is resolved here, so nothing is asked over the network.
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[
            0
        ]
        with socket.socket(family, kind) as probe:
            # Any free port: whether the wanted one is free is told with its holder.
            probe.bind(address)
    except socket.gaierror:
        if "%" not in host:
            return []
        problem = "names a network interface that this machine does not have"
    except OSError as exc:
        problem = f"is no address that this machine can listen on ({exc.strerror})"
    else:
        return []
    remedy = "Write 127.0.0.1, an address that `ip address` shows on the machine, or 0.0.0.0 for all of them."
    return [CATALOGUE.fault("setting_invalid", "host", f"{host} {problem}", remedy)]


def check_port(host: str, port: int, own: Collection[str], machine: Machine) -> list[Fault]:
    """Another program on the port, named. The unit's own process and one that is about to leave are not in the way."""
    return [
        CATALOGUE.fault(
            "port_taken",
            f"{item.address}:{item.port}",
            f"taken by {item.owner}",
            "Stop that program, or give the server another port.",
        )
        for item in in_the_way(listeners(machine, port), host)
        if item.unit not in own
    ]
