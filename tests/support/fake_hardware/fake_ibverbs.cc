// SPDX-License-Identifier: Apache-2.0
// Stands in for libibverbs.so.1: see script.h. The data path is in fake_ibverbs_network.cc.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tests/support/fake_hardware/fake_ibv_objects.h"

using namespace moeccl::driver::ibv_abi;

namespace {

// A list keeps the machine that it was made from, because the environment may describe another one by then.
struct Listed : Device {
  fake::Machine machine;
  size_t index = 0;
};
const fake::Nic& nic_of(Context* context) { return static_cast<fake::OpenDevice*>(context)->nic; }

const fake::Port* port_of(Context* context, uint32_t number) {
  const fake::Nic& nic = nic_of(context);
  return number == 0 || number > nic.ports.size() ? nullptr : &nic.ports[number - 1];
}

}  // namespace

FAKE_API Device** ibv_get_device_list(int* n) {
  const fake::Machine machine = fake::read_machine();
  if (machine.failure("ibv_list") != 0) {
    errno = machine.failure("ibv_list");
    return nullptr;
  }
  auto** list = new Device*[machine.nics.size() + 1]();
  for (size_t i = 0; i < machine.nics.size(); ++i) {
    auto* device = new Listed();
    device->machine = machine;
    device->index = i;
    std::strncpy(device->name, machine.nics[i].name.c_str(), sizeof(device->name) - 1);
    const std::string path = "/sys/class/infiniband/" + machine.nics[i].name;
    std::strncpy(device->ibdev_path, path.c_str(), sizeof(device->ibdev_path) - 1);
    device->node_type = 1;
    list[i] = device;
  }
  *n = static_cast<int>(machine.nics.size());
  return list;
}

FAKE_API void ibv_free_device_list(Device** list) {
  for (Device** at = list; *at != nullptr; ++at) delete static_cast<Listed*>(*at);
  delete[] list;
}

FAKE_API Context* ibv_open_device(Device* given) {
  const auto* device = static_cast<Listed*>(given);
  if (device->machine.failure("ibv_open") != 0) {
    errno = device->machine.failure("ibv_open");
    return nullptr;
  }
  auto* context = new fake::OpenDevice();
  context->nic = device->machine.nics[device->index];
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
  context->async_fd = ends[0];
  context->event_end = ends[1];
  context->cmd_fd = open("/dev/full", O_RDWR | O_CLOEXEC);  // a character device, as the real one
  fake::opened(context);
  return context;
}

FAKE_API int ibv_close_device(Context* context) {
  auto* device = static_cast<fake::OpenDevice*>(context);
  fake::closed(device);
  close(device->async_fd);
  close(device->event_end);
  close(device->cmd_fd);
  delete device;
  return 0;
}

FAKE_API int ibv_query_device(Context* context, DeviceAttr* attr) {
  const fake::Machine machine = fake::read_machine();
  if (machine.failure("ibv_query") != 0) return machine.failure("ibv_query");
  attr->phys_port_cnt = static_cast<uint8_t>(nic_of(context).ports.size());
  attr->max_qp_wr = 1024;
  attr->max_cqe = 1 << 20;
  attr->max_mr_size = ~uint64_t{0};
  return 0;
}

FAKE_API int ibv_query_port(Context* context, uint8_t number, PortAttr* attr) {
  const fake::Port* const port = port_of(context, number);
  if (port == nullptr) return EINVAL;
  attr->state = fake::are_ports_down() ? 1 : port->state;
  attr->active_mtu = port->mtu;
  attr->gid_tbl_len = 16;
  attr->max_msg_sz = 1u << 23;  // as with rxe
  attr->lid = static_cast<uint16_t>(port->layer == 1 ? 7 : 0);
  attr->active_width = static_cast<uint8_t>(port->width);
  attr->active_speed = static_cast<uint8_t>(port->speed);
  attr->link_layer = static_cast<uint8_t>(port->layer);
  return 0;
}

FAKE_API int ibv_query_gid(Context* context, uint8_t number, int index, uint8_t* gid) {
  const fake::Port* const port = port_of(context, number);
  if (port == nullptr || index < 0 || index >= 16) return -1;
  std::memset(gid, 0, 16);
  if (static_cast<size_t>(index) >= port->gids.size()) return 0;
  const std::string& hex = port->gids[static_cast<size_t>(index)];
  for (size_t i = 0; i < 16; ++i)
    gid[i] = static_cast<uint8_t>(std::strtoul(hex.substr(2 * i, 2).c_str(), nullptr, 16));
  return 0;
}

// On Ethernet, even entries are RoCE v1 and odd ones v2, as kernels fill the table.
FAKE_API int _ibv_query_gid_ex(Context* context, uint32_t number, uint32_t index, GidEntry* entry, uint32_t, size_t) {
  if (ibv_query_gid(context, static_cast<uint8_t>(number), static_cast<int>(index), entry->gid.raw) != 0)
    return ENODATA;
  entry->gid_index = index;
  entry->port_num = number;
  const fake::Port* const port = port_of(context, number);
  entry->gid_type = port->layer != 2 ? kGidInfiniband : index % 2 == 0 ? kGidRoceV1 : kGidRoceV2;
  return 0;
}
