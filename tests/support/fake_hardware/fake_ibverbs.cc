// Stands for libibverbs.so.1: see script.h.
#include <cerrno>
#include <cstring>

#include "src/driver/ibv_abi.h"
#include "tests/support/fake_hardware/script.h"

using namespace moeccl::driver::ibv_abi;

namespace {
fake::Machine* machine = nullptr;
size_t index_of(Context* context) { return reinterpret_cast<size_t>(context) - 1; }
}  // namespace

FAKE_API Device** ibv_get_device_list(int* n) {
  delete machine;
  machine = new fake::Machine(fake::read_machine());
  if (machine->failure("ibv_list") != 0) {
    errno = machine->failure("ibv_list");
    return nullptr;
  }
  auto** list = new Device*[machine->nics.size() + 1]();
  for (size_t i = 0; i < machine->nics.size(); ++i) {
    list[i] = new Device();
    std::strncpy(list[i]->name, machine->nics[i].name.c_str(), sizeof(list[i]->name) - 1);
    const std::string path = "/sys/class/infiniband/" + machine->nics[i].name;
    std::strncpy(list[i]->ibdev_path, path.c_str(), sizeof(list[i]->ibdev_path) - 1);
    list[i]->node_type = 1;
  }
  *n = static_cast<int>(machine->nics.size());
  return list;
}

FAKE_API void ibv_free_device_list(Device** list) {
  for (Device** at = list; *at != nullptr; ++at) delete *at;
  delete[] list;
  delete machine;
  machine = nullptr;
}

FAKE_API Context* ibv_open_device(Device* device) {
  if (machine->failure("ibv_open") != 0) {
    errno = machine->failure("ibv_open");
    return nullptr;
  }
  for (size_t i = 0; i < machine->nics.size(); ++i)
    if (machine->nics[i].name == device->name) return reinterpret_cast<Context*>(i + 1);
  return nullptr;
}
FAKE_API int ibv_close_device(Context*) { return 0; }

FAKE_API int ibv_query_device(Context* context, DeviceAttr* attr) {
  if (machine->failure("ibv_query") != 0) return machine->failure("ibv_query");
  attr->phys_port_cnt = static_cast<uint8_t>(machine->nics[index_of(context)].ports.size());
  return 0;
}

FAKE_API int ibv_query_port(Context* context, uint8_t number, PortAttr* attr) {
  const fake::Nic& nic = machine->nics[index_of(context)];
  if (number == 0 || number > nic.ports.size()) return EINVAL;
  const fake::Port& port = nic.ports[number - 1];
  attr->state = port.state;
  attr->active_mtu = port.mtu;
  attr->gid_tbl_len = 16;
  attr->active_width = static_cast<uint8_t>(port.width);
  attr->active_speed = static_cast<uint8_t>(port.speed);
  attr->link_layer = static_cast<uint8_t>(port.layer);
  return 0;
}

FAKE_API int ibv_query_gid(Context* context, uint8_t number, int index, uint8_t* gid) {
  const fake::Port& port = machine->nics[index_of(context)].ports[number - 1];
  std::memset(gid, 0, 16);
  if (static_cast<size_t>(index) >= port.gids.size()) return 0;
  for (size_t i = 0; i < 16; ++i)
    gid[i] =
        static_cast<uint8_t>(std::strtoul(port.gids[static_cast<size_t>(index)].substr(2 * i, 2).c_str(), nullptr, 16));
  return 0;
}
