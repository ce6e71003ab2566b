// SPDX-License-Identifier: Apache-2.0
// A machine that does not exist: a copy of /sys in a temporary folder, and a script for the fake libraries.
#pragma once

#include <string>
#include <vector>

#include "topology/probes.h"

namespace moeccl::topology {

// Returns the fake library of this name (tests/support/fake_hardware), beside the test program's build folder.
std::string fake_library(const std::string& name);

class FakeMachine {
 public:
  FakeMachine();
  ~FakeMachine();
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  void script(const std::string& commands);  // see tests/support/fake_hardware/script.h
  void write(const std::string& path, const std::string& text);
  // path is like "pci0000:16/0000:16:00.0/0000:17:00.0".
  void pci(const std::string& path, uint32_t device_class, uint32_t vendor, int numa, const std::string& speed = "",
           const std::string& width = "");
  void virtual_function(const std::string& path, const std::string& of);  // of: its device's path
  void interface(const std::string& name, const std::string& pci_path, int64_t mbit, int mtu, const std::string& state);
  void infiniband(const std::string& name, const std::string& pci_path, int numa);
  void cpu(int cpu, int package, int core, const std::string& cache_cpus);
  void numa(int number, const std::string& cpus, int gib);

  const std::string& root() const { return root_; }
  ProbeSources sources() const;  // all fake; hwloc absent

 private:
  std::string root_;
};

}  // namespace moeccl::topology
