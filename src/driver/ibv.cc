// SPDX-License-Identifier: Apache-2.0
#include "src/driver/ibv.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "src/driver/ibv_api.h"

namespace moeccl::driver {

namespace {

using namespace ibv_abi;

template <size_t n>
std::string bounded(const char (&text)[n]) {
  return std::string(text, strnlen(text, n));
}

std::string gid_text(const uint8_t (&gid)[16]) {
  std::string text;
  for (size_t i = 0; i < 16; i += 2) text += format("{}{:02x}{:02x}", i == 0 ? "" : ":", gid[i], gid[i + 1]);
  return text;
}

IbvPort port_of(const IbvApi& f, Context* context, uint8_t number, const PortAttr& attr) {
  IbvPort port;
  port.number = number;
  port.active = attr.state == kPortActive;
  port.infiniband = attr.link_layer == kLayerInfiniband || attr.link_layer == 0;  // 0: drivers older than RoCE
  port.ethernet = attr.link_layer == kLayerEthernet;
  port.gbit = ibv_gbit(attr.active_width, attr.active_speed);
  if (attr.active_mtu >= 1 && attr.active_mtu <= 5) port.mtu_bytes = 128u << attr.active_mtu;
  for (int g = 0; g < std::clamp(attr.gid_tbl_len, 0, 256) && port.gids.size() < 8; ++g) {
    uint8_t gid[16] = {};
    if (f.query_gid(context, number, g, gid) != 0) break;
    // An identifier of zeros, with or without a prefix, is an empty entry of the table.
    if (std::any_of(gid + 8, gid + 16, [](uint8_t b) { return b != 0; })) port.gids.push_back(gid_text(gid));
  }
  return port;
}

void ask_ports(const IbvApi& f, Device* device, IbvDevice* out) {
  Context* context = f.open_device(device);
  if (context == nullptr) {
    out->problem = format("cannot be opened ({}): is /dev/infiniband in this container, and may this user open it?",
                          std::strerror(errno));
    return;
  }
  DeviceAttr attr;
  std::memset(&attr, 0, sizeof(attr));
  if (const int rc = f.query_device(context, &attr); rc != 0) {
    out->problem = format("ibv_query_device fails with {}", rc);
  } else {
    for (uint8_t p = 1; p <= attr.phys_port_cnt && p < 255; ++p) {
      PortAttr port;
      std::memset(&port, 0, sizeof(port));
      if (f.query_port(context, p, &port) == 0) out->ports.push_back(port_of(f, context, p, port));
    }
  }
  f.close_device(context);
}

}  // namespace

double ibv_gbit(uint8_t width_code, uint8_t speed_code) {
  int lanes = 0;
  switch (width_code) {
    case 1:
      lanes = 1;
      break;
    case 2:
      lanes = 4;
      break;
    case 4:
      lanes = 8;
      break;
    case 8:
      lanes = 12;
      break;
    case 16:
      lanes = 2;
      break;
    default:
      return 0;
  }
  switch (speed_code) {  // the rates under which the generations are sold: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR
    case 1:
      return lanes * 2.5;
    case 2:
      return lanes * 5;
    case 4:
    case 8:
      return lanes * 10;
    case 16:
      return lanes * 14;
    case 32:
      return lanes * 25;
    case 64:
      return lanes * 50;
    case 128:
      return lanes * 100;
    default:
      return 0;
  }
}

Result<std::vector<IbvDevice>> list_ibv_devices(const std::string& library) {
  MOECCL_ASSIGN_OR_RETURN(const IbvApi f, IbvApi::load(library));
  int n = 0;
  Device** list = f.get_device_list(&n);
  if (list == nullptr)
    return error(moecclUnsupported, "ibv_get_device_list fails: {} (is the module ib_uverbs loaded?)",
                 std::strerror(errno));
  std::vector<IbvDevice> devices;
  for (int i = 0; i < n && list[i] != nullptr; ++i) {
    IbvDevice device;
    device.name = bounded(list[i]->name);
    ask_ports(f, list[i], &device);
    devices.push_back(std::move(device));
  }
  f.free_device_list(list);
  return devices;
}

}  // namespace moeccl::driver
