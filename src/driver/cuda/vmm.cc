// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/vmm.h"

#include <utility>
#include <vector>

#include "src/driver/cuda/aside.h"
#include "src/driver/cuda/idle.h"

namespace moeccl::driver::cuda {

namespace {

// Numbers and layouts of the driver's interface.
constexpr int kPinned = 1, kOnDevice = 1, kDescriptor = 1, kReadWrite = 3, kDescriptorsSupported = 103,
              kRdmaSupported = 110;
struct Location {
  int type = kOnDevice;
  int id = 0;
};
struct Properties {
  int type = kPinned;
  int handles = kDescriptor;
  Location location;
  void* windows = nullptr;
  unsigned char compression = 0, for_rdma = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};
struct Access {
  Location location;
  int flags = kReadWrite;
};

struct Functions {
  int (*granularity)(size_t*, const Properties*, int);
  int (*create)(uint64_t*, size_t, const Properties*, unsigned long long);
  int (*release)(uint64_t);
  int (*reserve)(Pointer*, size_t, size_t, Pointer, unsigned long long);
  int (*free_address)(Pointer, size_t);
  int (*map)(Pointer, size_t, size_t, uint64_t, unsigned long long);
  int (*unmap)(Pointer, size_t);
  int (*set_access)(Pointer, size_t, const Access*, size_t);
  int (*export_handle)(void*, uint64_t, int, unsigned long long);
  int (*import_handle)(uint64_t*, void*, int);
  int (*set_pool_access)(void*, const Access*, size_t);
};

// Returns null if the driver lacks any of the functions.
const Functions* functions() {
  static const auto* const all = []() -> const Functions* {
    auto* f = new Functions{};
    bool whole = driver() != nullptr;
    const auto find = [&](const char* name, auto* function) {
      if (whole) *function = reinterpret_cast<std::decay_t<decltype(*function)>>(driver_symbol(name));
      whole = whole && *function != nullptr;
    };
    find("cuMemGetAllocationGranularity", &f->granularity);
    find("cuMemCreate", &f->create);
    find("cuMemRelease", &f->release);
    find("cuMemAddressReserve", &f->reserve);
    find("cuMemAddressFree", &f->free_address);
    find("cuMemMap", &f->map);
    find("cuMemUnmap", &f->unmap);
    find("cuMemSetAccess", &f->set_access);
    find("cuMemExportToShareableHandle", &f->export_handle);
    find("cuMemImportFromShareableHandle", &f->import_handle);
    find("cuMemPoolSetAccess", &f->set_pool_access);
    if (!whole) delete f;
    return whole ? f : nullptr;
  }();
  return all;
}

Result<int> able_device() {
  if (functions() == nullptr)
    return error(moecclUnsupported, "the CUDA driver has no virtual memory management: it is older than CUDA 11.2");
  int device = 0, able = 0;
  MOECCL_TRY(check(driver()->cuCtxGetDevice(&device), "the context's device"));
  if (driver()->cuDeviceGetAttribute(&able, kDescriptorsSupported, device) != 0 || able == 0)
    return error(moecclUnsupported, "this CUDA device cannot share memory by file descriptors");
  return device;
}

}  // namespace

VirtualMemory& VirtualMemory::operator=(VirtualMemory&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(handle_, other.handle_);
  std::swap(has_handle_, other.has_handle_);
  std::swap(is_mapped_, other.is_mapped_);
  std::swap(address_, other.address_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

VirtualMemory::~VirtualMemory() {
  if (context_ == nullptr) return;
  when_idle(context_,
            [is_mapped = is_mapped_, has_handle = has_handle_, address = address_, mapped = mapped_, handle = handle_] {
              if (is_mapped) (void)functions()->unmap(address, mapped);
              if (address != 0) (void)functions()->free_address(address, mapped);
              if (has_handle) (void)functions()->release(handle);
            });
}

Status VirtualMemory::map(int device) {
  const Functions& f = *functions();
  MOECCL_TRY(check(f.reserve(&address_, mapped_, 0, 0, 0), format("{} bytes of device addresses", mapped_)));
  MOECCL_TRY(check(f.map(address_, mapped_, 0, handle_, 0), "mapping device memory"));
  is_mapped_ = true;
  const Access access{{kOnDevice, device}};
  return check(f.set_access(address_, mapped_, &access, 1), "access to device memory");
}

Result<VirtualMemory> VirtualMemory::create(Context context, size_t bytes) {
  const Current current(context);
  MOECCL_ASSIGN_OR_RETURN(const int device, able_device());
  const Functions& f = *functions();
  Properties properties;
  properties.location.id = device;
  int for_rdma = 0;
  properties.for_rdma = driver()->cuDeviceGetAttribute(&for_rdma, kRdmaSupported, device) == 0 && for_rdma != 0;
  size_t unit = 0;
  MOECCL_TRY(check(f.granularity(&unit, &properties, 0), "the granularity of device memory"));
  VirtualMemory m;
  m.context_ = context;
  m.mapped_ = (bytes + unit - 1) / unit * unit;
  MOECCL_TRY(check(f.create(&m.handle_, m.mapped_, &properties, 0), format("{} bytes of device memory", m.mapped_)));
  m.has_handle_ = true;
  MOECCL_TRY(m.map(device));
  MOECCL_TRY(zero(m.address_, m.mapped_));
  return m;
}

Result<VirtualMemory> VirtualMemory::open(Context context, const Fd& fd, size_t mapped_bytes) {
  const Current current(context);
  MOECCL_ASSIGN_OR_RETURN(const int device, able_device());
  VirtualMemory m;
  m.context_ = context;
  m.mapped_ = mapped_bytes;
  // The descriptor itself is passed in place of a handle's address.
  void* descriptor = reinterpret_cast<void*>(static_cast<intptr_t>(fd.get()));
  MOECCL_TRY(check(functions()->import_handle(&m.handle_, descriptor, kDescriptor), "opening a peer's device memory"));
  m.has_handle_ = true;
  MOECCL_TRY(m.map(device));
  return m;
}

Result<Fd> VirtualMemory::share() const {
  const Current current(context_);
  int fd = -1;
  MOECCL_TRY(check(functions()->export_handle(&fd, handle_, kDescriptor, 0), "sharing device memory"));
  return Fd(fd);
}

Status allow_access(const void* data, size_t mapped_bytes) {
  MOECCL_ASSIGN_OR_RETURN(const int device, able_device());
  const Access access{{kOnDevice, device}};
  return check(functions()->set_access(reinterpret_cast<Pointer>(data), mapped_bytes, &access, 1),
               "access to another device's memory");
}

Status allow_peers(const void* buffer, size_t bytes, const Pointed& what, std::span<const int> devices) {
  if (bytes == 0 || what.for_peers || what.type != kDeviceMemory) return {};
  std::vector<Access> access;
  for (const int device : devices) access.push_back({{kOnDevice, device}});
  const std::string why = format("access of other devices to a buffer at {}, which their kernels read", buffer);
  if (functions() == nullptr) return error(moecclUnsupported, "{}: the CUDA driver is older than CUDA 11.2", why);
  if (what.pool != nullptr) return check(functions()->set_pool_access(what.pool, access.data(), access.size()), why);
  const auto begin = reinterpret_cast<Pointer>(buffer), end = begin + bytes;
  Pointed part = what;
  for (Pointer p = begin; p < end;) {
    if (p > begin) part = pointed(reinterpret_cast<const void*>(p));
    if (part.mapping + part.mapping_bytes <= p) return {};
    MOECCL_TRY(check(functions()->set_access(part.mapping, part.mapping_bytes, access.data(), access.size()), why));
    p = part.mapping + part.mapping_bytes;
  }
  return {};
}

}  // namespace moeccl::driver::cuda
