// SPDX-License-Identifier: Apache-2.0
// Finds the net plugins of this process, by NCCL's own rules (src/driver/nccl_plugin.h).
//
// A library stays loaded for the life of the process, because plugins keep threads. All functions are thread-safe.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/status.h"
#include "transport/netplugin/net_api.h"

namespace moeccl::transport::netplugin {

// Returns the entries of MOECCL_NET_PLUGIN (a comma-separated list; "none": no plugin; empty: the default one).
std::vector<std::string> plugin_list(std::string_view value);

// One communicator's use of a plugin; finalize() is called when it ends.
class PluginUse {
 public:
  PluginUse(NetApi& api, void* context) : api_(&api), context_(context) {}
  PluginUse(PluginUse&& other) noexcept { *this = std::move(other); }
  PluginUse& operator=(PluginUse&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(context_, other.context_);
    std::swap(devices_, other.devices_);
    return *this;
  }
  ~PluginUse();

  NetApi& api() const { return *api_; }
  void* context() const { return context_; }
  // A device that the host can use, with the plugin's number for it.
  struct Device {
    int number = 0;
    DeviceProperties is;
  };
  const std::vector<Device>& devices() const { return devices_; }
  // Returns Unsupported, with the reasons, if there are none.
  Status find_devices();

 private:
  NetApi* api_ = nullptr;
  void* context_ = nullptr;
  std::vector<Device> devices_;
};

// A device must take this much in one transfer. A large put is cut into pieces of this size, small enough to keep all
// rails busy while the next one is copied.
inline constexpr size_t kPieceBytes = 256 << 10;

// Chooses the rails of one rank, at most kMaxRails: the fastest devices, without those below a quarter of the best
// one's rate. Where there are more, the ranks of a host take different ones, and the n-th rank of each host takes the
// same ones.
inline constexpr size_t kMaxRails = 4;
std::vector<PluginUse::Device> rails_of_rank(std::vector<PluginUse::Device> devices, size_t local_rank);

struct PluginChoice {
  std::string list = {};    // MOECCL_NET_PLUGIN
  std::string wanted = {};  // MOECCL_NET=plugin:<wanted>, compared with the plugins' names; empty: any
  uint64_t comm_id = 0;     // one for each communicator
};
// Uses the first plugin of the list that has devices. Unsupported says for each entry why it cannot be used.
Result<PluginUse> use_plugin(const PluginChoice& choice);

}  // namespace moeccl::transport::netplugin
