// SPDX-License-Identifier: Apache-2.0
// Memory that others see: a registered memfd, and device memory shared between processes.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/driver/cuda/vmm.h"
#include "src/driver/memory.h"
#include "src/driver/socket.h"
#include "tests/gpu/ladder/ladder.h"

namespace moeccl::ladder {
namespace {

constexpr size_t kBytes = 2u << 20;

Status fill(const Device& device, const void* data, unsigned char value) {
  MOECCL_TRY(
      cu::check(device.d().cuMemsetD8Async(reinterpret_cast<cu::Pointer>(data), value, kBytes, nullptr), "a memset"));
  return cu::check(device.d().cuStreamSynchronize(nullptr), "a memset");
}
Status expect_filled(const Device& device, const void* data, unsigned char value, const char* who) {
  std::vector<unsigned char> got(kBytes);
  MOECCL_TRY(cu::check(
      device.d().cuMemcpyDtoHAsync_v2(got.data(), reinterpret_cast<cu::Pointer>(data), kBytes, nullptr), "a copy"));
  MOECCL_TRY(cu::check(device.d().cuStreamSynchronize(nullptr), "a copy"));
  for (size_t i = 0; i < kBytes; ++i) {
    if (got[i] != value)
      return error(moecclInternalError, "{} reads {:#x} at byte {}, not {:#x}", who, got[i], i, value);
  }
  return {};
}

// Sent together with the descriptor, or instead of one.
struct Offer {
  cu::IpcHandle handle;
  uint64_t bytes;
};
struct Reply {
  uint64_t ok;
  char why[240];
};

// The owner fills memory with 0x5a and offers it; the other process checks it and fills it with 0xa5. `share` and
// `take` run in one process each, and both processes open the driver themselves because it does not survive a fork.
template <class OwnerMemory, class Share, class Take>
Result<std::string> between_processes(OwnerMemory&& allocate, Share&& share, Take&& take) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return system_error("socketpair", errno);
  const Fd mine(ends[0]), theirs(ends[1]);
  const Deadline deadline = Deadline::after_ms(4000);
  const pid_t child = fork();
  if (child == 0) {
    const Status status = contained([&]() -> Status {
      Offer offer{};
      std::vector<Fd> fds;
      MOECCL_TRY(driver::recv_fds(theirs.get(), std::as_writable_bytes(std::span(&offer, 1)), &fds, deadline));
      MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
      return take(device, offer, fds);
    });
    Reply reply{status.ok() ? 1u : 0u, {}};
    std::snprintf(reply.why, sizeof(reply.why), "%s", status.message().c_str());
    (void)driver::send_all(theirs.get(), std::as_bytes(std::span(&reply, 1)), deadline);
    _exit(0);
  }
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  MOECCL_ASSIGN_OR_RETURN(auto memory, allocate(device));
  MOECCL_TRY(fill(device, memory.data(), 0x5a));
  Offer offer{};
  std::vector<Fd> fds;
  MOECCL_TRY(share(device, memory, &offer, &fds));
  std::vector<int> numbers;
  for (const Fd& fd : fds) numbers.push_back(fd.get());
  MOECCL_TRY(driver::send_fds(mine.get(), std::as_bytes(std::span(&offer, 1)), numbers, deadline));
  Reply reply{};
  MOECCL_TRY(driver::recv_exact(mine.get(), std::as_writable_bytes(std::span(&reply, 1)), deadline));
  (void)waitpid(child, nullptr, 0);
  if (reply.ok == 0) return error(moecclSystemError, "the other process: {}", std::string(reply.why));
  MOECCL_TRY(expect_filled(device, memory.data(), 0xa5, "the owner"));
  return format("{} MiB, written and read by both processes", kBytes >> 20);
}

Status use(const Device& device, const void* data) {
  MOECCL_TRY(expect_filled(device, data, 0x5a, "the other process"));
  return fill(device, data, 0xa5);
}

}  // namespace

Result<std::string> share_by_descriptor() {
  return between_processes(
      [](const Device& device) { return cu::VirtualMemory::create(device.context(), kBytes); },
      [](const Device&, const cu::VirtualMemory& memory, Offer* offer, std::vector<Fd>* fds) -> Status {
        offer->bytes = memory.mapped_bytes();
        MOECCL_ASSIGN_OR_RETURN(Fd fd, memory.share());
        fds->push_back(std::move(fd));
        return {};
      },
      [](const Device& device, const Offer& offer, const std::vector<Fd>& fds) -> Status {
        if (fds.empty()) return error(moecclInternalError, "no descriptor came");
        MOECCL_ASSIGN_OR_RETURN(const auto memory, cu::VirtualMemory::open(device.context(), fds[0], offer.bytes));
        return use(device, memory.data());
      });
}

Result<std::string> share_by_ipc() {
  return between_processes(
      [](const Device& device) { return device.memory(kBytes); },
      [](const Device& device, const cu::Memory& memory, Offer* offer, std::vector<Fd>*) {
        return cu::check(device.d().cuIpcGetMemHandle(&offer->handle, reinterpret_cast<cu::Pointer>(memory.data())),
                         "an IPC handle");
      },
      [](const Device& device, const Offer& offer, const std::vector<Fd>&) -> Status {
        constexpr unsigned kLazyPeerAccess = 1;
        cu::Pointer p = 0;
        MOECCL_TRY(
            cu::check(device.d().cuIpcOpenMemHandle_v2(&p, offer.handle, kLazyPeerAccess), "opening an IPC handle"));
        const Status used = use(device, reinterpret_cast<const void*>(p));
        (void)device.d().cuIpcCloseMemHandle(p);
        return used;
      });
}

Result<std::string> write_to_memfd() {
  MOECCL_ASSIGN_OR_RETURN(const Device device, Device::open());
  const size_t bytes = driver::page_bytes();
  MOECCL_ASSIGN_OR_RETURN(const Fd fd, driver::shared_segment("ladder", bytes));
  MOECCL_TRY(driver::reserve_pages(fd, 0, bytes));
  MOECCL_ASSIGN_OR_RETURN(const driver::Mapping given, driver::map_segment(fd, bytes));
  MOECCL_ASSIGN_OR_RETURN(const driver::Mapping seen, driver::map_segment(fd, bytes));
  constexpr unsigned kPortable = 1, kMapped = 2;
  MOECCL_TRY(cu::check(device.d().cuMemHostRegister_v2(given.data(), given.size(), kPortable | kMapped),
                       "registering a memfd"));
  cu::Pointer p = 0;
  MOECCL_TRY(cu::check(device.d().cuMemHostGetDevicePointer_v2(&p, given.data(), 0), "the memfd's device address"));
  if (p != reinterpret_cast<cu::Pointer>(given.data()))
    return error(moecclUnsupported, "the device sees registered memory at another address");
  MOECCL_ASSIGN_OR_RETURN(const cu::Stream stream, device.stream());
  const auto* const word = reinterpret_cast<const uint64_t*>(seen.data());
  const auto arrives = [&](const uint64_t* at, uint64_t value) {
    for (const int64_t until = now_ns() + int64_t{1'000'000'000} * patience(); read_word(at) != value;) {
      if (now_ns() > until) return false;
    }
    return true;
  };
  std::vector<int64_t> ns;
  for (uint64_t i = 1; i <= 200; ++i) {
    const int64_t since = now_ns();
    MOECCL_TRY(cu::check(device.d().cuStreamWriteValue64_v2(stream, p, i, 0), "a store by the stream"));
    if (!arrives(word, i))
      return error(moecclSystemError, "the stream's store of {} has not come after {} s", i, patience());
    ns.push_back(now_ns() - since);
  }
  std::sort(ns.begin(), ns.end());
  // The same for a kernel's store: the spinning kernel stores that it has started.
  MOECCL_ASSIGN_OR_RETURN(const cu::Function spin, device.kernel("moeccl_ladder_spin"));
  auto* const host = reinterpret_cast<uint64_t*>(given.data());
  write_word(host + 2, 1);
  MOECCL_TRY(device.launch(spin, stream, SpinArgs{host + 1, host + 2, 100'000'000}));
  if (!arrives(word + 1, 1)) return error(moecclSystemError, "a kernel's store has not come after {} s", patience());
  MOECCL_TRY(cu::check(device.d().cuStreamSynchronize(stream), "the kernel"));
  MOECCL_TRY(cu::check(device.d().cuMemHostUnregister(given.data()), "taking a memfd back"));
  return format("stream to host {:.1f} us (median of {}), {:.1f} at worst",
                static_cast<double>(ns[ns.size() / 2]) / 1e3, ns.size(), static_cast<double>(ns.back()) / 1e3);
}

}  // namespace moeccl::ladder
