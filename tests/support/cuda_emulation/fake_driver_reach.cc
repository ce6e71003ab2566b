// SPDX-License-Identifier: Apache-2.0
// Decides which threads may touch the emulated driver's device memory, and when: work on a stream may, and each
// device's kernels may touch what that device reaches. Where the processor has protection keys, they enforce this for
// each thread separately: pages have the key of the devices that may use them, and a thread that runs a kernel opens
// the keys of its device. Elsewhere all device memory is open while any stream works.
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <utility>

#include "tests/support/cuda_emulation/cuda_emulation.h"
#include "tests/support/cuda_emulation/fake_driver.h"

namespace moeccl::emulation::driver {
namespace {

#if defined(__x86_64__) && defined(SYS_pkey_alloc)
uint32_t read_rights() {
  uint32_t rights = 0, high = 0;
  asm volatile(".byte 0x0f,0x01,0xee" : "=a"(rights), "=d"(high) : "c"(0));  // rdpkru
  return rights;
}
void write_rights(uint32_t rights) {
  asm volatile(".byte 0x0f,0x01,0xef" : : "a"(rights), "c"(0), "d"(0) : "memory");  // wrpkru
}
int new_key() { return static_cast<int>(syscall(SYS_pkey_alloc, 0, 1)); }  // 1: no access
int set_key(uint64_t base, size_t bytes, int key) {
  return static_cast<int>(syscall(SYS_pkey_mprotect, base, bytes, PROT_READ | PROT_WRITE, key));
}
#else
uint32_t read_rights() { return 0; }
void write_rights(uint32_t) {}
int new_key() { return -1; }
int set_key(uint64_t, size_t, int) { return -1; }
#endif

constexpr uint32_t kEverybody = (1u << kMostDevices) - 1;
constexpr uint32_t both_bits(int key) { return 3u << (2 * key); }
constexpr uint32_t no_access(int key) { return 1u << (2 * key); }

class Keys {
 public:
  static Keys& get() {
    static auto* const keys = new Keys;
    return *keys;
  }
  bool usable() const { return everybody_ >= 0; }
  // Call it under the machine's lock. When no keys are left, all devices may use the memory.
  int of(uint32_t devices) {
    const auto [it, is_new] = of_.try_emplace(devices, everybody_);
    if (!is_new) return it->second;
    if (const int key = new_key(); key >= 0) add(it->second = key, devices);
    return it->second;
  }
  uint32_t rights(uint32_t now, const Context* context) const {
    const uint32_t opened = (context == nullptr ? all_ : open_[static_cast<size_t>(context->device)]).load();
    return (now | closed_.load()) & ~opened;
  }

 private:
  Keys() {
    if (!rule("KEYS")) return;
    everybody_ = new_key();
    if (everybody_ >= 0) add(everybody_, kEverybody);
    of_[kEverybody] = everybody_;
  }
  void add(int key, uint32_t devices) {
    closed_ |= no_access(key);
    all_ |= both_bits(key);
    for (size_t d = 0; d < kMostDevices; ++d)
      if ((devices >> d & 1u) != 0) open_[d] |= both_bits(key);
  }
  int everybody_ = -1;
  std::map<uint32_t, int> of_;
  std::array<std::atomic<uint32_t>, kMostDevices> open_{};  // bits of keys, by device
  std::atomic<uint32_t> all_{0}, closed_{0};
};

// State without keys, under the machine's lock.
int users = 0;  // streams at work; device memory is accessible while there are any
bool is_open = false;
unsigned rests = 0;  // how many times no stream was at work

void protect_all() {
  for (const auto& [base, a] : machine().device) protect(base, a);
}

thread_local uint32_t rights_before = 0;
thread_local const Context* kernel_of = nullptr;  // the context whose kernel this thread runs

struct sigaction before_us;

// A kernel that touches memory that its device cannot reach, or that does not exist, ends there and fails the context.
// Any other fault has its usual effect.
void on_fault(int signal, siginfo_t* info, void*) {
  auto* const context = const_cast<Context*>(kernel_of);
  if (context == nullptr || !in_kernel()) {
    (void)sigaction(signal, &before_us, nullptr);  // the fault then occurs again
    return;
  }
  const auto p = reinterpret_cast<uint64_t>(info->si_addr);
  int owner = -1;
  {
    const std::lock_guard lock(machine().mutex);
    if (const Allocation* a = find_device(p); a != nullptr) owner = a->device;
  }
  char text[200];
  const int n = owner >= 0 ? std::snprintf(text, sizeof(text),
                                           "emulated device %d: a kernel touches memory of device %d, to which it has "
                                           "no access\n",
                                           context->device, owner)
                           : std::snprintf(text, sizeof(text), "emulated device %d: a kernel touches address %#lx\n",
                                           context->device, static_cast<unsigned long>(p));
  (void)!write(2, text, static_cast<size_t>(n));
  context->failed = kIllegalAddress;
  abandon();
}

void watch_faults() {
  static const bool once = [] {
    struct sigaction a = {};
    a.sa_sigaction = on_fault;
    a.sa_flags = SA_SIGINFO | SA_NODEFER;  // the handler may not return
    (void)sigaction(SIGSEGV, &a, &before_us);
    return true;
  }();
  (void)once;
}

}  // namespace

bool reach_is_checked() { return Keys::get().usable() && rule("REACH"); }

void protect(uint64_t base, const Allocation& a) {
  if (!Keys::get().usable()) {
    (void)mprotect(reinterpret_cast<void*>(base), a.bytes,
                   is_open && a.access != 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
    return;
  }
  (void)set_key(base, a.bytes, Keys::get().of(a.access != 0 && !rule("REACH") ? kEverybody : a.access));
}

Access::Access(const Context* context, bool kernel) {
  if (kernel) {
    watch_faults();
    kernel_of = context;
  }
  if (Keys::get().usable()) {
    rights_before = read_rights();
    write_rights(Keys::get().rights(rights_before, context));
    return;
  }
  const std::lock_guard lock(machine().mutex);
  if (users++ == 0 && !std::exchange(is_open, true)) protect_all();
}
Access::~Access() {
  kernel_of = nullptr;
  if (Keys::get().usable()) {
    write_rights(rights_before);
    return;
  }
  const std::lock_guard lock(machine().mutex);
  if (--users > 0) return;
  // Changing the pages of all allocations is slow. This happens always at first, then at every eighth rest, which is
  // often enough to catch host code that follows a device pointer.
  if (++rests > 64 && rests % 8 != 0) return;
  is_open = false;
  protect_all();
}

bool reaches(const Context& context, uint64_t p, size_t bytes, bool copies) {
  if (bytes == 0) return true;
  const std::lock_guard lock(machine().mutex);
  uint64_t base = 0;
  const Allocation* const a = find_device(p, &base);
  if (a == nullptr) return true;
  if (p + bytes > base + a->bytes) return false;
  const bool own = (a->access >> context.device & 1u) != 0;
  return own || (copies && !a->mapped && a->pool == nullptr) || !rule("REACH");
}

}  // namespace moeccl::emulation::driver

// For tests: returns whether kernels that touch memory out of their device's reach are caught here.
EXPORT int moeccl_emulated_reach() { return moeccl::emulation::driver::reach_is_checked() ? 1 : 0; }
