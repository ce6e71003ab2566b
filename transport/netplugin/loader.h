// SPDX-License-Identifier: Apache-2.0
// Which net plugins this process has: NCCL's own rules of where they lie and which of a library's versions is taken.
//
// A library stays loaded for the life of the process: plugins keep threads. Safe for threads.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/status.h"
#include "transport/netplugin/net_api.h"

namespace moeccl::transport::netplugin {

// The values of MOECCL_NET_PLUGIN (a comma list; "none": no plugin; empty: the default one), then the file names to
// try for one value: as it is given, then libnccl-net-<value>.so where it is a bare name.
std::vector<std::string> plugin_list(std::string_view value);
std::vector<std::string> file_names(const std::string& entry);

// A communicator's use of one plugin; finalize() is called when it ends.
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
  // What the host can use, by the plugin's number.
  struct Device {
    int number = 0;
    DeviceProperties is;
  };
  const std::vector<Device>& devices() const { return devices_; }
  // Unsupported: none, and why.
  Status find_devices();

 private:
  NetApi* api_ = nullptr;
  void* context_ = nullptr;
  std::vector<Device> devices_;
};

// A device must take so much at once: a large put is cut into such pieces, small enough to keep all rails busy while
// the next one is copied.
inline constexpr size_t kPieceBytes = 256 << 10;

// The rails of one rank, at most kMaxRails: the fastest devices, those with less than a quarter of the best one's rate
// left out. Where there are more, the ranks of a host take different ones, the n-th rank of each host the same.
inline constexpr size_t kMaxRails = 4;
std::vector<PluginUse::Device> choose_rails(std::vector<PluginUse::Device> devices, size_t local_rank);

struct PluginChoice {
  std::string list = {};    // MOECCL_NET_PLUGIN
  std::string wanted = {};  // MOECCL_NET=plugin:<wanted>, compared with the plugins' names; empty: any
  uint64_t comm_id = 0;     // one for each communicator
  int traffic_class = -1;   // abi::kUndefined
};
// The first of the list that has devices. Unsupported says of each why it is not that one.
Result<PluginUse> use_plugin(const PluginChoice& choice);

}  // namespace moeccl::transport::netplugin
