# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The faults of GPUs and their links: every way in which cards can be less than healthy, linked cards."""

from __future__ import annotations

from ..faults import Catalogue, FaultKind

GPU = Catalogue(
    "GPUs (gpu_inventory, nvlink_topology)",
    (
        FaultKind(
            "no_pci_device",
            "critical",
            "The PCI bus shows no NVIDIA GPU, so no driver can help.",
            "no NVIDIA display or 3D controller (class 0300 or 0302 of vendor 10de) on the PCI bus",
        ),
        FaultKind(
            "no_driver",
            "critical",
            "The NVIDIA kernel driver is not loaded.",
            "nvidia-smi couldn't communicate with the NVIDIA driver; 4 GPUs are on the PCI bus",
        ),
        FaultKind(
            "nvidia_smi_missing",
            "critical",
            "The nvidia-smi program cannot be run.",
            "nvidia-smi cannot be started: No such file or directory",
        ),
        FaultKind(
            "driver_mismatch",
            "critical",
            "The loaded kernel module and the user-space libraries are of different driver versions.",
            "the loaded kernel module is 580.173.02, the libraries are of another version (nvidia-smi: 580.178)",
        ),
        FaultKind(
            "nvml_unavailable",
            "critical",
            "NVML, the library behind nvidia-smi, could not start for another reason.",
            "nvidia-smi: Failed to initialize NVML: Unknown Error",
        ),
        FaultKind(
            "no_devices",
            "critical",
            "The driver runs and finds no usable GPU.",
            'nvidia-smi answers "No devices were found" although 4 GPUs are on the PCI bus',
        ),
        FaultKind(
            "nvidia_smi_timeout",
            "critical",
            "nvidia-smi did not end within its time limit; this says nothing about the number of GPUs.",
            "nvidia-smi did not answer within 30 s",
        ),
        FaultKind(
            "nvidia_smi_unparsable",
            "critical",
            "The answer of nvidia-smi is of no form that is known.",
            "no GPU table in the answer; it begins with: Segmentation fault",
        ),
        FaultKind(
            "gpu_lost",
            "critical",
            "The driver has lost contact with a GPU (the state behind Xid 79).",
            "the driver cannot reach this GPU: GPU is lost (still present on the PCI bus)",
        ),
        FaultKind(
            "gpu_missing",
            "critical",
            "Fewer GPUs answer than the machine has or should have.",
            "3 of 4 expected GPUs answer in nvidia-smi; on the PCI bus but not in nvidia-smi: 0000:89:00.0",
        ),
        FaultKind(
            "gpu_requires_reset",
            "critical",
            "A GPU refuses work until it is reset.",
            "the GPU requires a reset before it accepts work",
        ),
        FaultKind(
            "gpu_unreadable",
            "critical",
            "A GPU is listed but its values cannot be read.",
            "nvidia-smi cannot read this GPU: 38 of 38 fields are unknown error",
        ),
        FaultKind(
            "gpu_surplus",
            "error",
            "More GPUs answer than expected.",
            "8 GPUs answer in nvidia-smi, 4 expected",
        ),
        FaultKind(
            "gpu_listed_twice",
            "warning",
            "The answer of nvidia-smi has a GPU more than once; it is counted once.",
            "listed more than once and counted once, with the values that came first: 0000:1a:00.0 (GPU0)",
        ),
        FaultKind(
            "gpu_product_mismatch",
            "error",
            "A GPU is not of the expected product.",
            "Tesla V100-SXM2-16GB (10de:1db1), expected Tesla V100-SXM2-32GB",
        ),
        FaultKind(
            "gpu_memory_too_small",
            "error",
            "A GPU has less memory than required.",
            "16384 MiB of memory, at least 32000 MiB required",
        ),
        FaultKind(
            "driver_branch_mismatch",
            "error",
            "The driver is not of the expected branch.",
            "driver 550.163.01 is loaded, branch 535 expected",
        ),
        FaultKind(
            "persistence_off",
            "error",
            "Persistence mode is not enabled on a GPU.",
            "persistence mode is still off after 60 s",
        ),
        FaultKind(
            "ecc_uncorrected",
            "error",
            "A GPU has counted more uncorrected memory errors than allowed.",
            "3 uncorrected memory errors since the last driver load, at most 0 allowed",
        ),
        FaultKind(
            "page_retirement_pending",
            "error",
            "Memory pages (or rows) wait for a reboot to be taken out of use.",
            "memory pages are to be retired at the next driver load",
        ),
        FaultKind(
            "gpu_too_hot",
            "error",
            "A GPU or its memory is hotter than allowed.",
            "the core is at 88 degrees C, at most 80 allowed",
        ),
        FaultKind(
            "gpu_slowed_down",
            "error",
            "The hardware slows a GPU down because of heat or power.",
            "clocks are held down now: hw_thermal_slowdown",
        ),
        FaultKind(
            "gpu_in_use",
            "error",
            "Programs other than the allowed ones use a GPU.",
            "python3 (pid 4711) holds 2048 MiB",
        ),
        FaultKind(
            "gpu_value_unknown",
            "warning",
            "A value that a requirement is about is not reported, so it could not be judged.",
            "uncorrected memory errors are not known (not supported), at most 0 allowed",
        ),
        FaultKind(
            "gpu_field_unreadable",
            "warning",
            "Single values of a GPU cannot be read although its kind has them.",
            "not readable now: power_w (read error (ERR!))",
        ),
        FaultKind(
            "inforom_corrupt",
            "warning",
            "The InfoROM of a GPU is damaged: settings and error counts may be lost.",
            "infoROM is corrupted at gpu 0000:3B:00.0",
        ),
        FaultKind(
            "pcie_link_degraded",
            "warning",
            "A GPU has fewer PCIe lanes than it and its slot can have.",
            "PCIe runs on 8 of 16 lanes",
        ),
        FaultKind(
            "topology_unavailable",
            "critical",
            "The answer to `nvidia-smi topo -m` has no link matrix.",
            "no link matrix in the answer; it begins with: GPU 0: Tesla V100-SXM2-16GB",
        ),
        FaultKind(
            "topology_truncated",
            "critical",
            "The link matrix is incomplete.",
            "the header names 8 GPUs, rows are missing for GPU4 to GPU7",
        ),
        FaultKind(
            "topology_contradictory",
            "critical",
            "The link matrix contradicts itself.",
            "GPU0 says NV2 of GPU1, GPU1 says SYS of GPU0",
        ),
        FaultKind(
            "topology_cell_unknown",
            "critical",
            "A cell of the link matrix holds a word that is not known.",
            "GPU0-GPU1 reads 'QPI'",
        ),
        FaultKind(
            "topology_not_links",
            "critical",
            "The matrix is one of peer access (`topo -p2p`), which says nothing about links.",
            "the answer is a peer-to-peer matrix (OK, CNS, ...), not a link matrix",
        ),
        FaultKind(
            "gpu_not_found",
            "critical",
            "A GPU named in `gpus` is not on this machine, or cannot be told which one it is.",
            "no GPU with index 7; the matrix has 0 to 3",
        ),
        FaultKind(
            "nvlink_not_full_mesh",
            "error",
            "Some pairs of the GPUs in use have no NVLink between them.",
            "4 of 6 pairs have no NVLink: 0-2 (SYS), 0-3 (SYS), 1-2 (SYS), 1-3 (SYS)",
        ),
        FaultKind(
            "nvlink_islands_too_small",
            "error",
            "The GPUs in use do not form fully linked groups of the required size.",
            "groups of 4 required, found 0,1 and 2,3",
        ),
        FaultKind(
            "nvlink_too_few_links",
            "error",
            "A pair of GPUs is joined by fewer NVLinks than required.",
            "NV1, at least 2 links required",
        ),
        FaultKind(
            "nvlink_inactive",
            "error",
            "NVLinks of a GPU are down.",
            "4 of 6 NVLinks are active; inactive: 3, 5",
        ),
        FaultKind(
            "nvlink_status_truncated",
            "error",
            "The answer to `nvidia-smi nvlink -s` is incomplete.",
            "no status for GPU1, GPU2, GPU3",
        ),
        FaultKind(
            "nvlink_status_unknown",
            "warning",
            "The state of the links is not known; whether all are active could not be judged.",
            "no link state in the answer to `nvlink -s`; it begins with: GPU0",
        ),
        FaultKind(
            "nvlink_fewer_than_product",
            "warning",
            "All GPUs alike use fewer NVLinks than the product has: the board may wire only these.",
            "4 of 6 NVLinks are active on every GPU",
        ),
        FaultKind(
            "nvlink_slow",
            "warning",
            "A link runs at a lower rate than the others.",
            "link 2 runs at 12.891 GB/s, the others at 25.781 GB/s",
        ),
        FaultKind(
            "peer_access_missing",
            "warning",
            "Peer access is not possible between some GPUs.",
            "no peer access: 0-1 (CNS)",
        ),
    ),
)
