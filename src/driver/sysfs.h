// SPDX-License-Identifier: Apache-2.0
// Reads /sys: processors, PCI devices, network interfaces. With another root, it reads a copy from another machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/base/status.h"

namespace moeccl::driver {

class Sysfs {
 public:
  explicit Sysfs(std::string root = "/sys") : root_(std::move(root)) {}
  // Paths are below the root, such as "class/net". Returns the first 64 KiB of a file without its trailing newlines, or
  // "" if it cannot be read.
  std::string read(const std::string& path) const;
  int64_t number(const std::string& path, int64_t otherwise) const;  // decimal, or hexadecimal after 0x
  std::vector<std::string> list(const std::string& path) const;      // sorted; empty if it cannot be read
  // Returns the target of a link as a full path, or "" if it does not exist.
  std::string real(const std::string& path) const;
  bool exists(const std::string& path) const;
  bool is_live() const { return root_ == "/sys"; }

 private:
  std::string root_;
};

struct SysfsPciDevice {
  // From the root complex to the device: "pci0000:16", "0000:16:00.0", ..., "0000:18:00.0".
  std::vector<std::string> path;
  uint32_t device_class = 0;  // base and sub class, 0x0302
  uint32_t vendor = 0;
  int numa = -1;
  double bytes_per_ns = 0;  // of its PCIe link at present: speed times width, less the line code; 0 if unknown
  std::string physical;     // of a virtual function (SR-IOV): its physical device, "0000:18:00.0"
};
std::vector<SysfsPciDevice> sysfs_pci_devices(const Sysfs& sysfs);

struct SysfsInterface {
  std::string name;
  std::vector<std::string> path;  // as SysfsPciDevice::path; empty for interfaces without a PCI device
  int numa = -1;
  bool infiniband = false;  // IPoIB
  bool loopback = false;
  bool is_virtual = false;  // bridges, tunnels, veth: no device behind it
  std::string state;        // "up", "down", "unknown"
  int64_t mbit = 0;         // 0 if the driver does not report it
  uint32_t mtu_bytes = 0;
  uint32_t port = 1;    // of its device, counted from 1
  std::string address;  // the first IPv4 address, or else the first IPv6 address; only if the root is /sys
};
std::vector<SysfsInterface> sysfs_interfaces(const Sysfs& sysfs);

struct SysfsCpu {
  uint32_t cpu = 0;
  int package = -1, core = -1;
  int first_thread = -1;        // of the processors of its core; -1: unknown
  std::string last_cache_cpus;  // processors that share its level-3 cache, "0-7"; "" if it has none
  uint64_t last_cache_bytes = 0;
};
std::vector<SysfsCpu> sysfs_cpus(const Sysfs& sysfs);  // only those that are online

struct SysfsNuma {
  int number = 0;
  std::string cpus;  // "0-7"
  uint64_t memory_bytes = 0;
};
std::vector<SysfsNuma> sysfs_numa(const Sysfs& sysfs);

// Returns the PCI components of a path below /sys/devices; see SysfsPciDevice::path.
std::vector<std::string> pci_path(const std::string& real_path);

}  // namespace moeccl::driver
