// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/rail.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "src/base/name_list.h"
#include "src/driver/children.h"
#include "src/driver/ibv.h"

namespace moeccl::transport::verbs {

using namespace driver::ibv_abi;

namespace {

constexpr int kMostGids = 256;
constexpr const char* kNotActive = "its port is not active: look at the cable and the switch (ibstat, rdma link)";

GidKind kind_of(uint32_t type) {
  if (type == kGidRoceV2) return GidKind::kRoceV2;
  return type == kGidRoceV1 ? GidKind::kRoceV1 : GidKind::kInfiniband;
}

// Before rdma-core 34 only sysfs tells the kinds of a RoCE port's entries.
GidKind kind_in_sysfs(const std::string& device_path, uint8_t port, int index) {
  std::ifstream file(format("{}/ports/{}/gid_attrs/types/{}", device_path, port, index));
  std::string text;
  if (!std::getline(file, text)) return GidKind::kUnknown;
  if (text.starts_with("RoCE v2")) return GidKind::kRoceV2;
  return text.starts_with("IB/RoCE v1") ? GidKind::kRoceV1 : GidKind::kUnknown;
}

std::vector<GidChoice> gid_table(const driver::IbvApi& api, Context* context, const std::string& path, uint8_t port,
                                 const PortAttr& attr) {
  std::vector<GidChoice> table;
  const bool ethernet = attr.link_layer == kLayerEthernet;
  for (int i = 0; i < std::clamp(attr.gid_tbl_len, 0, kMostGids); ++i) {
    GidChoice g;
    g.index = static_cast<uint32_t>(i);
    GidEntry entry = {};
    if (api.query_gid_ex != nullptr && api.query_gid_ex(context, port, g.index, &entry, 0, sizeof(entry)) == 0) {
      g.gid = entry.gid;
      g.kind = kind_of(entry.gid_type);
    } else if (api.query_gid(context, port, i, g.gid.raw) == 0) {
      g.kind = ethernet ? kind_in_sysfs(path, port, i) : GidKind::kInfiniband;
    } else {
      continue;
    }
    if (!is_empty(g.gid)) table.push_back(g);
  }
  return table;
}

std::string where(const FoundRail& r) { return format("{}: {}", r.info.name(), r.problem); }

}  // namespace

// Registering an invalid descriptor fails because of the descriptor, or because the call is not supported.
Status takes_dmabuf(const driver::IbvApi& api, ProtectionDomain* pd) {
  if (api.reg_dmabuf_mr == nullptr)
    return error(moecclUnsupported, "libibverbs is older than rdma-core 34 and knows no dma-buf");
  errno = 0;
  MemoryRegion* const region = api.reg_dmabuf_mr(pd, 0, 0, 0, -1, 0);
  if (region != nullptr) (void)api.dereg_mr(region);
  if (errno != EOPNOTSUPP && errno != EPROTONOSUPPORT) return {};
  return error(moecclUnsupported, "the NIC's driver takes no dma-buf: {}", std::strerror(errno));
}

Result<DeviceList> DeviceList::get(const driver::IbvApi& api) {
  int n = 0;
  Device** const list = api.get_device_list(&n);
  if (list == nullptr)
    return error(moecclUnsupported, "ibv_get_device_list fails: {} (is the module ib_uverbs loaded?)",
                 std::strerror(errno));
  return DeviceList(api, list, n);
}

DeviceList::~DeviceList() {
  if (list_ != nullptr) api_->free_device_list(list_);
}

bool admits(const std::string& hca, const std::string& device, uint32_t port) {
  const NameList list(hca);
  const bool named = std::any_of(list.names.begin(), list.names.end(), [&](NameList::Name n) {
    const size_t colon = std::min(n.text.find(':'), n.text.size());
    const bool any_port = colon == n.text.size();
    const bool same_port = any_port || parse_number<uint32_t>(std::string_view(n.text).substr(colon + 1)) == port;
    n.text.resize(colon);
    return same_port && n.matches(device);
  });
  return hca.empty() || named != list.all_but;
}

void DeviceList::look_at(Device* device, const Env& settings, std::vector<FoundRail>* out) const {
  const std::string name(device->name, strnlen(device->name, sizeof(device->name)));
  const std::string path(device->ibdev_path, strnlen(device->ibdev_path, sizeof(device->ibdev_path)));
  FoundRail rail;
  rail.device = device;
  rail.info.device = name;
  Context* const context = api_->open_device(device);
  if (context == nullptr) {
    rail.problem = format("it cannot be opened ({}): is /dev/infiniband in this container, and may this user open it?",
                          std::strerror(errno));
    if (admits(settings.ib_hca, name, 1)) out->push_back(rail);
    return;
  }
  DeviceAttr attr = {};
  if (const int rc = api_->query_device(context, &attr); rc != 0) {
    rail.problem = format("ibv_query_device fails: {}", std::strerror(rc));
    out->push_back(rail);
  }
  if (ProtectionDomain* const pd = api_->alloc_pd(context); pd != nullptr) {
    rail.info.dmabuf = takes_dmabuf(*api_, pd).ok();
    (void)api_->dealloc_pd(pd);
  }
  for (uint32_t p = 1; p <= attr.phys_port_cnt && p < 255; ++p) {
    if (!admits(settings.ib_hca, name, p)) continue;
    FoundRail found = rail;
    RailInfo& info = found.info;
    info.port = static_cast<uint8_t>(p);
    PortAttr port = {};
    if (const int rc = api_->query_port(context, info.port, &port); rc != 0) {
      found.problem = format("ibv_query_port fails: {}", std::strerror(rc));
      out->push_back(found);
      continue;
    }
    info.ethernet = port.link_layer == kLayerEthernet;
    info.needs_route = info.ethernet || (port.flags & kPortNeedsGrh) != 0;
    info.lid = port.lid;
    info.mtu_code = static_cast<uint8_t>(std::clamp(port.active_mtu, 1, 5));
    info.gbit = driver::ibv_gbit(port.active_width, port.active_speed);
    if (port.state != kPortActive) {
      found.problem = kNotActive;
    } else {
      Result<GidChoice> gid =
          choose_gid(gid_table(*api_, context, path, info.port, port), info.ethernet, settings.ib_gid_index);
      if (gid.ok()) {
        info.gid = *gid;
      } else {
        found.problem = gid.status().message();
      }
    }
    out->push_back(found);
  }
  api_->close_device(context);
}

Result<std::vector<FoundRail>> DeviceList::look(const Env& settings) const {
  std::vector<FoundRail> found;
  for (int i = 0; i < n_ && list_[i] != nullptr; ++i) look_at(list_[i], settings, &found);
  if (found.empty() && n_ > 0 && !settings.ib_hca.empty()) {
    std::string there;
    for (int i = 0; i < n_; ++i)
      there += format("{}{}", i == 0 ? "" : ", ",
                      std::string(list_[i]->name, strnlen(list_[i]->name, sizeof(list_[i]->name))));
    return error(moecclInvalidArgument,
                 "MOECCL_IB_HCA (else NCCL_IB_HCA): \"{}\" leaves no port of the RDMA devices that are here: {}",
                 settings.ib_hca, there);
  }
  return found;
}

Result<std::vector<FoundRail>> usable_rails(std::vector<FoundRail> found) {
  std::string problems;
  for (const FoundRail& r : found)
    if (!r.problem.empty()) problems += (problems.empty() ? "" : "; ") + where(r);
  std::erase_if(found, [](const FoundRail& r) { return !r.problem.empty(); });
  if (found.empty()) {
    return error(moecclUnsupported, "{}", problems.empty() ? "libibverbs is here and finds no device" : problems);
  }
  const auto best = std::max_element(found.begin(), found.end(),
                                     [](const FoundRail& a, const FoundRail& b) { return a.info.gbit < b.info.gbit; });
  const double gbit = best->info.gbit;
  const bool ethernet = best->info.ethernet;
  std::erase_if(found, [&](const FoundRail& r) { return r.info.ethernet != ethernet || r.info.gbit * 4 < gbit; });
  std::sort(found.begin(), found.end(), [](const FoundRail& a, const FoundRail& b) {
    return std::pair(a.info.device, a.info.port) < std::pair(b.info.device, b.info.port);
  });
  return found;
}

Result<std::unique_ptr<Rail>> Rail::open(const driver::IbvApi& api, const FoundRail& found) {
  std::unique_ptr<Rail> rail(new Rail(api, found.info));
  {
    const driver::ForkPause pause;
    rail->context_ = api.open_device(found.device);
    if (rail->context_ != nullptr) driver::keep_from_children(rail->context_->cmd_fd);
    keep_queues_from_children();  // pages that opening maps
  }
  if (rail->context_ == nullptr)
    return error(moecclSystemError, "{} cannot be opened: {}", found.info.name(), std::strerror(errno));
  DeviceAttr attr = {};
  PortAttr port = {};
  if (api.query_device(rail->context_, &attr) != 0 || api.query_port(rail->context_, found.info.port, &port) != 0)
    return error(moecclSystemError, "{} cannot be asked for its limits", found.info.name());
  constexpr uint32_t kLongest = 1u << 30;
  rail->max_message_bytes_ = port.max_msg_sz == 0 ? kLongest : std::min(port.max_msg_sz, kLongest);
  rail->max_requests_ = static_cast<uint32_t>(std::max(attr.max_qp_wr, 1));
  rail->max_entries_ = static_cast<uint32_t>(std::max(attr.max_cqe, 1));
  // Events are taken between other work, so reading them must not block.
  const int flags = fcntl(rail->context_->async_fd, F_GETFL);
  if (flags < 0 || fcntl(rail->context_->async_fd, F_SETFL, flags | O_NONBLOCK) != 0)
    return system_error(format("the events of {}", found.info.name()), errno);
  rail->pd_ = api.alloc_pd(rail->context_);
  if (rail->pd_ == nullptr)
    return error(moecclSystemError, "{} gives no protection domain: {}", found.info.name(), std::strerror(errno));
  return rail;
}

void keep_queues_from_children() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char shared = 0;  // 's' or 'p'; a program or library may have such a name too
    if (line.find("/uverbs") == std::string::npos ||
        std::sscanf(line.c_str(), "%lx-%lx %*3c%c", &begin, &end, &shared) != 3 || shared != 's')
      continue;
    (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTFORK);
  }
}

Status Rail::make_queue(uint32_t entries) {
  cq_ = api_->create_cq(context_, static_cast<int>(std::min(entries, max_entries_)), nullptr, nullptr, 0);
  if (cq_ != nullptr) return {};
  return error(moecclSystemError, "{} gives no completion queue of {} entries: {}", info_.name(), entries,
               std::strerror(errno));
}

Rail::~Rail() {
  if (cq_ != nullptr) (void)api_->destroy_cq(cq_);
  if (pd_ != nullptr) (void)api_->dealloc_pd(pd_);
  if (context_ != nullptr) (void)api_->close_device(context_);
}

void Rail::take_events(int64_t now_ns) {
  AsyncEvent event = {};
  while (api_->get_async_event(context_, &event) == 0) {
    const bool own_port = event.element.port_num == info_.port;
    switch (event.event_type) {
      case kEventPortError:
        if (own_port && down_since_ns_ == 0) down_since_ns_ = now_ns;
        break;
      case kEventPortActive:
        if (own_port) down_since_ns_ = 0;
        break;
      case kEventDeviceFatal:
        fatal_ = "the device reports a fatal error: see the kernel's log";
        break;
      case kEventQueueError:
        fatal_ = "its completion queue overflowed, which is an error of MoECCL";
        break;
      default:  // about one queue pair, whose completions say more, or of no consequence here
        break;
    }
    api_->ack_async_event(&event);
  }
}

std::string Rail::trouble(int64_t now_ns) const {
  if (!fatal_.empty()) return fatal_;
  if (down_since_ns_ == 0) return "";
  return format("its port went down {} ms ago: look at the cable and the switch",
                (now_ns - down_since_ns_) / 1'000'000);
}

std::string Rail::known_trouble(int64_t now_ns) {
  take_events(now_ns);
  return trouble(now_ns);
}

std::string Rail::port_trouble() const {
  PortAttr port = {};
  if (const int rc = api_->query_port(context_, info_.port, &port); rc != 0)
    return format("ibv_query_port fails: {}", std::strerror(rc));
  return port.state == kPortActive ? "" : kNotActive;
}

Status Rail::health(int64_t now_ns) const {
  if (!fatal_.empty() || (down_since_ns_ != 0 && now_ns - down_since_ns_ > kPortGraceMs * 1'000'000)) {
    return error(moecclRemoteError, "{} ({}): {}", info_.name(), text_of(info_.gid.gid), trouble(now_ns));
  }
  return {};
}

}  // namespace moeccl::transport::verbs
