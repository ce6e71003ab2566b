// SPDX-License-Identifier: Apache-2.0
// MOECCL_TEST_MACHINE describes the machine that the fake libraries show: commands separated by ';', words by spaces.
//
//   gpu PCI NAME GIB GENERATION LANES [MAJOR]  in NVML's and CUDA's order; '_' in NAME stands for a space; MAJOR is the
//                                            compute capability's, 9 if it is left out
//   nvlink GPU switch|gpu|cpu PCI COUNT VERSION  VERSION: nvml.h's number
//   p2p GPU GPU                              each may read the other
//   nic NAME GUID                            a verbs device
//   port STATE MTU WIDTH SPEED LAYER         of the last nic, in verbs' numbers
//   gid HEX                                  of the last port, 32 digits
//   fail WHAT CODE                           nvml_init, nvml_count, cuda_init, ibv_open, ibv_list, ibv_query
#pragma once

#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace fake {

struct NvLink {
  int type;
  std::string pci;
  unsigned version;
};
struct Gpu {
  std::string pci, name;
  unsigned long long gib = 0;
  unsigned generation = 0, lanes = 0;
  int compute_major = 9;
  std::vector<NvLink> links;
};
struct Port {
  int state = 0, mtu = 0, width = 0, speed = 0, layer = 0;
  std::vector<std::string> gids;
};
struct Nic {
  std::string name, guid;
  std::vector<Port> ports;
};
struct Machine {
  std::vector<Gpu> gpus;
  std::vector<Nic> nics;
  std::map<std::pair<size_t, size_t>, bool> p2p;
  std::map<std::string, int> fail;

  int failure(const std::string& what) const {
    const auto it = fail.find(what);
    return it == fail.end() ? 0 : it->second;
  }
};

inline Machine read_machine() {
  Machine m;
  const char* script = std::getenv("MOECCL_TEST_MACHINE");
  std::istringstream commands(script == nullptr ? "" : script);
  for (std::string command; std::getline(commands, command, ';');) {
    std::istringstream words(command);
    std::string verb;
    words >> verb;
    if (verb == "gpu") {
      Gpu g;
      words >> g.pci >> g.name >> g.gib >> g.generation >> g.lanes;
      if (int major = 0; words >> major) g.compute_major = major;
      for (char& c : g.name) c = c == '_' ? ' ' : c;
      m.gpus.push_back(g);
    } else if (verb == "nvlink") {
      size_t gpu = 0, count = 0;
      std::string type, pci;
      unsigned version = 0;
      words >> gpu >> type >> pci >> count >> version;
      const int code = type == "gpu" ? 0 : type == "cpu" ? 1 : type == "switch" ? 2 : 255;
      for (size_t i = 0; i < count && gpu < m.gpus.size(); ++i) m.gpus[gpu].links.push_back({code, pci, version});
    } else if (verb == "p2p") {
      size_t a = 0, b = 0;
      words >> a >> b;
      m.p2p[{a, b}] = m.p2p[{b, a}] = true;
    } else if (verb == "nic") {
      Nic n;
      words >> n.name >> n.guid;
      m.nics.push_back(n);
    } else if (verb == "port" && !m.nics.empty()) {
      Port p;
      words >> p.state >> p.mtu >> p.width >> p.speed >> p.layer;
      m.nics.back().ports.push_back(p);
    } else if (verb == "gid" && !m.nics.empty() && !m.nics.back().ports.empty()) {
      std::string hex;
      words >> hex;
      m.nics.back().ports.back().gids.push_back(hex);
    } else if (verb == "fail") {
      std::string what;
      int code = 0;
      words >> what >> code;
      m.fail[what] = code;
    }
  }
  return m;
}

}  // namespace fake

#define FAKE_API extern "C" __attribute__((visibility("default")))
