// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/topology/fake_machine.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace moeccl::topology {

namespace fs = std::filesystem;

std::string fake_library(const std::string& name) {
  std::error_code bad;
  const fs::path here = fs::read_symlink("/proc/self/exe", bad).parent_path();
  const fs::path library = here / "support/fake_hardware" / ("libfake_" + name + ".so");
  EXPECT_TRUE(fs::exists(library, bad)) << library;
  return library;
}

FakeMachine::FakeMachine() {
  std::string pattern = fs::temp_directory_path() / "moeccl_machine_XXXXXX";
  const char* made = mkdtemp(pattern.data());
  EXPECT_NE(made, nullptr) << pattern;
  root_ = made == nullptr ? "/nonexistent" : made;
}

FakeMachine::~FakeMachine() {
  unsetenv("MOECCL_TEST_MACHINE");
  std::error_code bad;
  fs::remove_all(root_, bad);
}

void FakeMachine::script(const std::string& commands) { setenv("MOECCL_TEST_MACHINE", commands.c_str(), 1); }

void FakeMachine::write(const std::string& path, const std::string& text) {
  std::error_code bad;
  fs::create_directories(fs::path(root_ + "/" + path).parent_path(), bad);
  std::ofstream(root_ + "/" + path) << text << "\n";
}

void FakeMachine::pci(const std::string& path, uint32_t device_class, uint32_t vendor, int numa,
                      const std::string& speed, const std::string& width) {
  const std::string at = "devices/" + path;
  char text[32];
  std::snprintf(text, sizeof(text), "0x%04x00", device_class);
  write(at + "/class", text);
  std::snprintf(text, sizeof(text), "0x%04x", vendor);
  write(at + "/vendor", text);
  write(at + "/numa_node", std::to_string(numa));
  if (!speed.empty()) write(at + "/current_link_speed", speed);
  if (!width.empty()) write(at + "/current_link_width", width);
  std::error_code bad;
  fs::create_directories(root_ + "/bus/pci/devices", bad);
  fs::create_directory_symlink("../../../" + at, root_ + "/bus/pci/devices/" + fs::path(path).filename().string(), bad);
}

void FakeMachine::virtual_function(const std::string& path, const std::string& of) {
  pci(path, 0x0200, 0x15b3, 0);
  std::error_code bad;
  fs::create_directory_symlink(root_ + "/devices/" + of, root_ + "/devices/" + path + "/physfn", bad);
}

void FakeMachine::interface(const std::string& name, const std::string& pci_path, int64_t mbit, int mtu,
                            const std::string& state) {
  const std::string at = "class/net/" + name;
  write(at + "/type", name.starts_with("ib") ? "32" : name == "lo" ? "772" : "1");
  write(at + "/speed", std::to_string(mbit));
  write(at + "/mtu", std::to_string(mtu));
  write(at + "/operstate", state);
  std::error_code bad;
  if (!pci_path.empty())
    fs::create_directory_symlink("../../../devices/" + pci_path, root_ + "/" + at + "/device", bad);
}

void FakeMachine::infiniband(const std::string& name, const std::string& pci_path, int numa) {
  const std::string at = "class/infiniband/" + name;
  write("devices/" + pci_path + "/numa_node", std::to_string(numa));
  std::error_code bad;
  fs::create_directories(root_ + "/" + at, bad);
  fs::create_directory_symlink("../../../devices/" + pci_path, root_ + "/" + at + "/device", bad);
}

void FakeMachine::cpu(int cpu, int package, int core, const std::string& cache_cpus) {
  const std::string at = "devices/system/cpu/cpu" + std::to_string(cpu);
  write(at + "/topology/physical_package_id", std::to_string(package));
  write(at + "/topology/core_id", std::to_string(core));
  write(at + "/cache/index3/level", "3");
  write(at + "/cache/index3/shared_cpu_list", cache_cpus);
  write(at + "/cache/index3/size", "32768K");
}

void FakeMachine::numa(int number, const std::string& cpus, int gib) {
  const std::string at = "devices/system/node/node" + std::to_string(number);
  write(at + "/cpulist", cpus);
  write(at + "/meminfo",
        "Node " + std::to_string(number) + " MemTotal:       " + std::to_string(int64_t{gib} << 20) + " kB");
}

ProbeSources FakeMachine::sources() const {
  ProbeSources sources;
  sources.sysfs_root = root_;
  sources.proc_root = root_ + "/proc";
  sources.dev_root = root_ + "/dev";
  sources.hwloc_library = "/nonexistent/libhwloc.so";
  sources.ibv_library = fake_library("ibverbs");
  sources.nvml_library = fake_library("nvml");
  sources.cuda_library = fake_library("cuda");
  sources.cuda = true;
  return sources;
}

}  // namespace moeccl::topology
