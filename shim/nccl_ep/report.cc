// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl_ep/report.h"

#include <dlfcn.h>

#include <cstdio>

namespace moeccl::shim::ep {
namespace {

struct Found {
  const moecclNcclHooks* hooks = nullptr;
  std::string why;
};

// The shim is among the global libraries where it was preloaded or linked. A program that opens NCCL by itself, as
// Python's does, may keep its symbols to itself; then the library is found by its SONAME.
Found find_hooks() {
  Found found;
  void* symbol = dlsym(RTLD_DEFAULT, MOECCL_NCCL_HOOKS);
  if (symbol == nullptr) {
    void* nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (nccl == nullptr) {
      found.why = "no libnccl.so.2 is loaded";
      return found;
    }
    symbol = dlsym(nccl, MOECCL_NCCL_HOOKS);
    if (symbol == nullptr) {
      Dl_info file{};
      const void* of = dlsym(nccl, "ncclGetVersion");
      const bool known = of != nullptr && dladdr(of, &file) != 0 && file.dli_fname != nullptr;
      found.why = "NCCL is " + std::string(known ? file.dli_fname : "another library") + ", not MoECCL's";
      return found;
    }
  }
  const auto get = reinterpret_cast<moecclNcclHooks_t>(symbol);
  found.hooks = get();
  if (found.hooks == nullptr) found.why = "MoECCL's libnccl.so.2 has no core (its own message says why)";
  if (found.hooks != nullptr && found.hooks->size < sizeof(moecclNcclHooks)) {
    found.hooks = nullptr;
    found.why = "MoECCL's libnccl.so.2 is older than this libnccl_ep.so.0: install both from one build";
  }
  return found;
}

}  // namespace

const moecclNcclHooks* hooks(std::string* why) {
  // An NCCL that comes later is found, too.
  static const moecclNcclHooks* known = nullptr;
  if (const auto* const k = __atomic_load_n(&known, __ATOMIC_ACQUIRE); k != nullptr) return k;
  Found found = find_hooks();
  if (why != nullptr) *why = std::move(found.why);
  if (found.hooks != nullptr) __atomic_store_n(&known, found.hooks, __ATOMIC_RELEASE);
  return found.hooks;
}

ncclResult_t fail(ncclResult_t code, const std::string& text) {
  if (const moecclNcclHooks* h = hooks(); h != nullptr) return h->fail(code, text.c_str());
  std::fprintf(stderr, "moeccl-nccl-ep: %s\n", text.c_str());
  return code;
}

ncclResult_t from_moeccl(moecclResult_t result) {
  if (result == moecclSuccess) return ncclSuccess;
  const ncclResult_t code = hooks()->failed(result);
  if (result != moecclMismatch) return code;
  return fail(code, std::string(moecclGetLastError(nullptr)) +
                        " (a rank that calls allreduce here has refused its call: ncclGetLastError there says why)");
}

}  // namespace moeccl::shim::ep
