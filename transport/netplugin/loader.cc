// SPDX-License-Identifier: Apache-2.0
#include "transport/netplugin/loader.h"

#include <strings.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "src/base/log.h"
#include "src/base/text.h"
#include "src/driver/fork_page.h"
#include "src/driver/nccl_plugin.h"

namespace moeccl::transport::netplugin {
namespace {

constexpr driver::NcclPluginKind kKind = {"net plugin", "libnccl-net", "ncclNetPlugin_v", abi::kOldest, abi::kNewest};
constexpr size_t kMaxPlugins = 14;  // of a list, as in NCCL
constexpr size_t kMaxName = 254;
constexpr int64_t kSlowest = 4;  // a rail may be this many times slower than the best one

bool same_name(const std::string& a, const std::string& b) { return strcasecmp(a.c_str(), b.c_str()) == 0; }

// One entry of a list after it was tried.
struct Loaded {
  std::string entry;
  std::unique_ptr<NetApi> api;  // null: see `why_not`
  std::string why_not;
};

Loaded load(const std::string& entry) {
  Loaded made{entry, nullptr, {}};
  Result<driver::NcclPlugin> opened = driver::open_plugin(kKind, entry);
  if (!opened.ok()) {
    made.why_not = opened.status().message();
    return made;
  }
  made.api = adapt(opened->version, opened->structure, opened->file);
  log(LogLevel::kInfo, "net plugin {}: loaded for \"{}\"", made.api->text(), entry);
  return made;
}

struct Registry {
  std::mutex mutex;
  std::vector<std::unique_ptr<Loaded>> tried;
  std::atomic<bool> has_plugins{false};  // or is loading one
  std::atomic<bool> has_devices{false};  // some plugin had

  Loaded& get(const std::string& entry) {
    for (const auto& l : tried) {
      if (l->entry == entry) return *l;
    }
    const bool before = has_plugins.exchange(true);
    tried.push_back(std::make_unique<Loaded>(load(entry)));
    has_plugins.store(before || tried.back()->api != nullptr);
    return *tried.back();
  }
};

// Plugins have threads that outlive main(), and a forked child has none of its parent's. Another thread of the parent
// may have held the plugin's locks, or the registry's, when it forked.
constinit driver::PerProcess<Registry> registries;
Registry& registry() { return registries.get(); }

Result<PluginUse> try_plugin(NetApi& api, const PluginChoice& choice) {
  MOECCL_ASSIGN_OR_RETURN(void* const context, api.init(choice.comm_id));
  PluginUse use(api, context);  // from here on finalize() is called, even when there are no devices
  MOECCL_TRY(use.find_devices());
  return use;
}

}  // namespace

std::vector<std::string> plugin_list(std::string_view value) {
  if (value.empty()) return {"libnccl-net.so"};
  if (same_name(std::string(value), "none")) return {};
  std::vector<std::string> entries;
  for (const std::string_view item : comma_items(value))
    if (!item.empty() && item.size() <= kMaxName && entries.size() < kMaxPlugins) entries.emplace_back(item);
  return entries;
}

PluginUse::~PluginUse() {
  if (api_ == nullptr) return;
  const Status ended = contained([&] { return api_->finalize(context_); });
  if (!ended.ok()) log(LogLevel::kWarn, "{}", ended.message());
}

Status PluginUse::find_devices() {
  MOECCL_ASSIGN_OR_RETURN(const int n, api_->devices());
  if (n == 0) return error(moecclUnsupported, "net plugin {}: devices says 0", api_->text());
  MOECCL_TRY(api_->complete());
  std::string why_not;
  for (int i = 0; i < n; ++i) {
    MOECCL_ASSIGN_OR_RETURN(DeviceProperties is, api_->properties(i));
    if (is.device_type != abi::kDeviceHost) {
      why_not += format("; {} wants to be driven by a GPU (type {})", is.name, is.device_type);
    } else if (is.max_bytes < kPieceBytes) {
      why_not += format("; {} takes at most {} bytes at once, {} are needed", is.name, is.max_bytes, kPieceBytes);
    } else if ((is.ptr_support & abi::kPtrHost) == 0) {
      why_not += format("; {} takes no host memory", is.name);
    } else {
      devices_.push_back({i, std::move(is)});
    }
  }
  if (!devices_.empty()) return {};
  return error(moecclUnsupported, "net plugin {}: none of its {} devices serves{}", api_->text(), n, why_not);
}

std::vector<PluginUse::Device> rails_of_rank(std::vector<PluginUse::Device> devices, size_t local_rank) {
  int64_t best = 0;
  for (const PluginUse::Device& d : devices) best = std::max(best, d.is.mbit_per_s);
  std::erase_if(devices, [&](const PluginUse::Device& d) { return d.is.mbit_per_s * kSlowest < best; });
  if (devices.size() <= kMaxRails) return devices;
  const size_t first = local_rank * kMaxRails % devices.size();
  std::rotate(devices.begin(), devices.begin() + static_cast<ptrdiff_t>(first), devices.end());
  devices.resize(kMaxRails);
  return devices;
}

namespace {

// Without the plugin, the child's ranks may be on a slower network, which its user would not expect.
Status not_after_fork() {
  const Status why =
      error(moecclUnsupported,
            "this process was forked from one that had loaded a net plugin, whose threads and locks do not survive "
            "a fork: fork before the first communicator between hosts is made, or set MOECCL_NET=tcp");
  static std::atomic<uint32_t> said_in{0};
  const uint32_t here = driver::process_number();
  const bool misses = registries.any_inherited([](const Registry& parents) { return parents.has_devices.load(); });
  if (misses && said_in.exchange(here) != here) log(LogLevel::kWarn, "no net plugin is used: {}", why.message());
  return why;
}

}  // namespace

Result<PluginUse> use_plugin(const PluginChoice& choice) {
  if (registries.any_inherited([](const Registry& parents) { return parents.has_plugins.load(); }))
    return not_after_fork();
  const std::lock_guard lock(registry().mutex);
  std::vector<std::string> entries = plugin_list(choice.list);
  // As in NCCL_NET_PLUGIN, NAME may also name a file, unless a list says otherwise.
  if (!choice.wanted.empty() && choice.list.empty()) entries.push_back(choice.wanted);
  std::string why_not;
  for (const std::string& entry : entries) {
    const auto note = [&](const std::string& why) {
      why_not += format("{}{}: {}", why_not.empty() ? "" : "; ", entry, why);
    };
    Loaded& l = registry().get(entry);
    if (l.api == nullptr) {
      note(l.why_not);
      continue;
    }
    if (!choice.wanted.empty() && !l.api->is_called(choice.wanted) && entry != choice.wanted) {
      note(format("its plugin's name is {}", l.api->name()));
      continue;
    }
    Result<PluginUse> use = try_plugin(*l.api, choice);
    if (use.ok()) {
      registry().has_devices.store(true);
      return use;
    }
    note(use.status().message());
  }
  if (choice.list.empty() && choice.wanted.empty() && registry().get(entries[0]).api == nullptr) {
    return error(moecclUnsupported, "there is no {} here, and MOECCL_NET_PLUGIN names no other plugin ({})", entries[0],
                 registry().get(entries[0]).why_not);
  }
  if (entries.empty()) return error(moecclUnsupported, "MOECCL_NET_PLUGIN is \"{}\": it names no plugin", choice.list);
  return error(moecclUnsupported, "no net plugin{} can be used: {}",
               choice.wanted.empty() ? "" : format(" named {}", choice.wanted), why_not);
}

}  // namespace moeccl::transport::netplugin
