// SPDX-License-Identifier: GPL-3.0-or-later
// Stands for the NVIDIA driver on the lab's virtual machine: binds the card in slot 0x10 (an `edu` of qemu with the
// identity of a V100) and says its version where the real driver does. It touches no hardware.
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

static const struct pci_device_id ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = 0x030200, .class_mask = ~0 },
	{ PCI_DEVICE(0x1234, 0x11e8) },
	{ }
};
MODULE_DEVICE_TABLE(pci, ids);

static struct proc_dir_entry *folder;

static int version_show(struct seq_file *file, void *data)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " LAB_VERSION "  Thu Jun 26 02:17:40 UTC 2025\n");
	return 0;
}

static int probe(struct pci_dev *device, const struct pci_device_id *id)
{
	return 0;
}

static void remove(struct pci_dev *device)
{
}

static struct pci_driver driver = { .name = "nvidia", .id_table = ids, .probe = probe, .remove = remove };

// What the parts of the driver hold on to, so that it cannot go before them.
int nvidia_lab_part(void)
{
	return 0;
}
EXPORT_SYMBOL(nvidia_lab_part);

static int __init begin(void)
{
	folder = proc_mkdir("driver/nvidia", NULL);
	if (!folder || !proc_create_single("version", 0444, folder, version_show))
		return -ENOMEM;
	return pci_register_driver(&driver);
}

static void __exit end(void)
{
	pci_unregister_driver(&driver);
	proc_remove(folder);
}

module_init(begin);
module_exit(end);
MODULE_LICENSE("NVIDIA");
MODULE_VERSION(LAB_VERSION);
