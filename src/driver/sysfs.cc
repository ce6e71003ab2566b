// SPDX-License-Identifier: Apache-2.0
#include "src/driver/sysfs.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

namespace moeccl::driver {

namespace {

namespace fs = std::filesystem;

bool is_hex(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isxdigit(c) != 0; });
}
// "0000:3b:00.0"
bool is_pci_address(std::string_view text) {
  const size_t n = text.size();
  return n >= 12 && text[n - 2] == '.' && text[n - 5] == ':' && text[n - 8] == ':' && is_hex(text.substr(0, n - 8)) &&
         is_hex(text.substr(n - 7, 2)) && is_hex(text.substr(n - 4, 2));
}
// "pci0000:16"
bool is_pci_root(std::string_view text) {
  const size_t colon = text.find(':');
  return text.starts_with("pci") && colon != std::string_view::npos && is_hex(text.substr(3, colon - 3)) &&
         is_hex(text.substr(colon + 1));
}

// Converts "16.0 GT/s PCIe" and "16" to GB/s in each direction. The line code is 8b/10b up to 5 GT/s and 128b/130b from
// 8 GT/s. (64 GT/s sends flits, which counts the same here.)
double pcie_rate(const std::string& speed, const std::string& width) {
  double gt = 0, lanes = 0;
  std::from_chars(speed.data(), speed.data() + speed.size(), gt);  // "." whatever the program's locale is
  std::from_chars(width.data(), width.data() + width.size(), lanes);
  if (!(gt > 0 && gt < 1e4) || !(lanes > 0 && lanes <= 64)) return 0;
  return gt * lanes / 8 * (gt < 8 ? 0.8 : 128.0 / 130.0);
}

std::map<std::string, std::string> addresses_of_interfaces() {
  std::map<std::string, std::string> found;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return found;
  for (const int family : {AF_INET, AF_INET6})
    for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
      if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != family || found.contains(at->ifa_name)) continue;
      char text[INET6_ADDRSTRLEN] = {};
      const void* address = family == AF_INET
                                ? static_cast<const void*>(&reinterpret_cast<sockaddr_in*>(at->ifa_addr)->sin_addr)
                                : &reinterpret_cast<sockaddr_in6*>(at->ifa_addr)->sin6_addr;
      if (inet_ntop(family, address, text, sizeof(text)) != nullptr) found[at->ifa_name] = text;
    }
  freeifaddrs(list);
  return found;
}

// "32768K"
uint64_t cache_bytes(const std::string& text) {
  uint64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || value > (uint64_t{1} << 40)) return 0;
  const char unit = end == text.data() + text.size() ? ' ' : *end;
  return unit == 'K' ? value << 10 : unit == 'M' ? value << 20 : value;
}

}  // namespace

std::string Sysfs::read(const std::string& path) const {
  std::ifstream in(root_ + "/" + path, std::ios::binary);
  std::string text(64 << 10, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(0, in.gcount())));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

int64_t Sysfs::number(const std::string& path, int64_t otherwise) const {
  const std::string text = read(path);
  const bool hex = text.starts_with("0x");
  int64_t value = 0;
  const auto [end, code] =
      std::from_chars(text.data() + (hex ? 2 : 0), text.data() + text.size(), value, hex ? 16 : 10);
  return code == std::errc() && end == text.data() + text.size() ? value : otherwise;
}

std::vector<std::string> Sysfs::list(const std::string& path) const {
  std::vector<std::string> names;
  std::error_code bad;
  for (fs::directory_iterator at(root_ + "/" + path, bad), end; !bad && at != end; at.increment(bad))
    names.push_back(at->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::string Sysfs::real(const std::string& path) const {
  std::error_code bad;
  const fs::path found = fs::canonical(root_ + "/" + path, bad);
  return bad ? "" : found.string();
}

bool Sysfs::exists(const std::string& path) const {
  std::error_code bad;
  return fs::exists(root_ + "/" + path, bad);
}

std::vector<std::string> pci_path(const std::string& real_path) {
  std::vector<std::string> parts;
  for (const fs::path& part : fs::path(real_path))
    if (const std::string text = part.string(); is_pci_root(text) || is_pci_address(text)) parts.push_back(text);
  return parts;
}

std::vector<SysfsPciDevice> sysfs_pci_devices(const Sysfs& sysfs) {
  std::vector<SysfsPciDevice> devices;
  for (const std::string& name : sysfs.list("bus/pci/devices")) {
    const std::string at = "bus/pci/devices/" + name;
    SysfsPciDevice device;
    device.path = pci_path(sysfs.real(at));
    if (device.path.empty() || !is_pci_address(device.path.back())) continue;
    device.device_class = static_cast<uint32_t>(sysfs.number(at + "/class", 0) >> 8);
    device.vendor = static_cast<uint32_t>(sysfs.number(at + "/vendor", 0));
    device.numa = static_cast<int>(sysfs.number(at + "/numa_node", -1));
    device.physical = fs::path(sysfs.real(at + "/physfn")).filename().string();
    device.bytes_per_ns = pcie_rate(sysfs.read(at + "/current_link_speed"), sysfs.read(at + "/current_link_width"));
    devices.push_back(device);
  }
  return devices;
}

std::vector<SysfsInterface> sysfs_interfaces(const Sysfs& sysfs) {
  const std::map<std::string, std::string> addresses =
      sysfs.is_live() ? addresses_of_interfaces() : std::map<std::string, std::string>();
  std::vector<SysfsInterface> interfaces;
  for (const std::string& name : sysfs.list("class/net")) {
    const std::string at = "class/net/" + name;
    const int64_t type = sysfs.number(at + "/type", -1);  // ARPHRD_*
    if (type < 0) continue;                               // bonding_masters is a file
    SysfsInterface i;
    i.name = name;
    i.infiniband = type == 32;
    i.loopback = type == 772;
    i.path = pci_path(sysfs.real(at + "/device"));
    i.is_virtual = !sysfs.exists(at + "/device");
    i.numa = static_cast<int>(sysfs.number(at + "/device/numa_node", -1));
    i.state = sysfs.read(at + "/operstate");
    i.mbit = std::max<int64_t>(0, sysfs.number(at + "/speed", 0));
    i.mtu_bytes = static_cast<uint32_t>(std::max<int64_t>(0, sysfs.number(at + "/mtu", 0)));
    i.port = static_cast<uint32_t>(std::clamp<int64_t>(sysfs.number(at + "/dev_port", 0), 0, 254)) + 1;
    if (const auto it = addresses.find(name); it != addresses.end()) i.address = it->second;
    interfaces.push_back(i);
  }
  return interfaces;
}

std::vector<SysfsCpu> sysfs_cpus(const Sysfs& sysfs) {
  std::vector<SysfsCpu> cpus;
  for (const std::string& name : sysfs.list("devices/system/cpu")) {
    uint32_t cpu = 0;
    const char* end = name.data() + name.size();
    if (!name.starts_with("cpu") || std::from_chars(name.data() + 3, end, cpu).ptr != end || name.size() == 3) continue;
    const std::string at = "devices/system/cpu/" + name;
    if (sysfs.number(at + "/online", 1) == 0 || !sysfs.exists(at + "/topology")) continue;
    SysfsCpu c;
    c.cpu = cpu;
    c.package = static_cast<int>(sysfs.number(at + "/topology/physical_package_id", -1));
    c.core = static_cast<int>(sysfs.number(at + "/topology/core_id", -1));
    const std::string threads = sysfs.read(at + "/topology/thread_siblings_list");
    std::from_chars(threads.data(), threads.data() + threads.size(), c.first_thread);
    for (const std::string& index : sysfs.list(at + "/cache")) {
      if (sysfs.number(at + "/cache/" + index + "/level", 0) != 3) continue;
      c.last_cache_cpus = sysfs.read(at + "/cache/" + index + "/shared_cpu_list");
      c.last_cache_bytes = cache_bytes(sysfs.read(at + "/cache/" + index + "/size"));
    }
    cpus.push_back(c);
  }
  std::sort(cpus.begin(), cpus.end(), [](const SysfsCpu& a, const SysfsCpu& b) { return a.cpu < b.cpu; });
  return cpus;
}

std::vector<SysfsNuma> sysfs_numa(const Sysfs& sysfs) {
  std::vector<SysfsNuma> domains;
  for (const std::string& name : sysfs.list("devices/system/node")) {
    int number = 0;
    const char* end = name.data() + name.size();
    if (!name.starts_with("node") || name.size() == 4 || std::from_chars(name.data() + 4, end, number).ptr != end)
      continue;
    SysfsNuma domain;
    domain.number = number;
    domain.cpus = sysfs.read("devices/system/node/" + name + "/cpulist");
    // "Node 0 MemTotal:       15427688 kB"
    const std::string text = sysfs.read("devices/system/node/" + name + "/meminfo");
    if (const size_t at = text.find("MemTotal:"); at != std::string::npos)
      domain.memory_bytes = std::strtoull(text.c_str() + at + 9, nullptr, 10) << 10;
    domains.push_back(domain);
  }
  std::sort(domains.begin(), domains.end(), [](const SysfsNuma& a, const SysfsNuma& b) { return a.number < b.number; });
  return domains;
}

}  // namespace moeccl::driver
