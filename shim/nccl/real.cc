// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/real.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string_view>
#include <vector>

#include "src/base/trusted_library.h"

namespace moeccl::shim {
namespace {

constexpr const char* kFile = "libnccl.so.2";
std::atomic<const Real*> open_real{nullptr};

void add_paths(std::string_view list, const std::string& origin, std::vector<std::string>& folders) {
  while (!list.empty()) {
    const size_t colon = std::min(list.find(':'), list.size());
    std::string folder(list.substr(0, colon));
    list.remove_prefix(std::min(colon + 1, list.size()));
    for (const std::string_view word : {"$ORIGIN", "${ORIGIN}"}) {
      if (const size_t at = folder.find(word); at != std::string::npos) folder.replace(at, word.size(), origin);
    }
    if (folder[0] == '/') folders.push_back(std::move(folder));  // never from the working directory
  }
}

// Adds the folders where the libraries that need libnccl.so.2 (PyTorch's, say) would have found it: their RPATH and
// RUNPATH.
void add_needers(std::vector<std::string>& folders) {
  for (const link_map* map = _r_debug.r_map; map != nullptr; map = map->l_next) {
    if (map->l_ld == nullptr) continue;
    const char* strings = nullptr;
    for (const auto* d = map->l_ld; d->d_tag != DT_NULL; ++d) {
      if (d->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(d->d_un.d_ptr);
    }
    // glibc relocates this pointer in place on the machines that we know; where it does not, the pointer is an offset.
    if (strings == nullptr || reinterpret_cast<uint64_t>(strings) < map->l_addr) continue;
    bool needs = false;
    std::vector<std::string_view> lists;
    for (const auto* d = map->l_ld; d->d_tag != DT_NULL; ++d) {
      if (d->d_tag == DT_NEEDED) needs |= std::strcmp(strings + d->d_un.d_val, kFile) == 0;
      if (d->d_tag == DT_RPATH || d->d_tag == DT_RUNPATH) lists.emplace_back(strings + d->d_un.d_val);
    }
    if (!needs) continue;
    const std::string origin = std::filesystem::path(map->l_name).parent_path().string();
    for (const std::string_view list : lists) add_paths(list, origin, folders);
  }
}

// Adds LD_LIBRARY_PATH and the system's own folders, as the dynamic linker would go through them for this library.
void add_linker_paths(std::vector<std::string>& folders) {
  Dl_info self;
  if (dladdr(&open_real, &self) == 0) return;
  void* handle = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return;
  Dl_serinfo head;
  if (dlinfo(handle, RTLD_DI_SERINFOSIZE, &head) == 0) {
    std::vector<char> memory(head.dls_size);
    auto* all = reinterpret_cast<Dl_serinfo*>(memory.data());
    all->dls_size = head.dls_size;
    all->dls_cnt = head.dls_cnt;
    if (dlinfo(handle, RTLD_DI_SERINFO, all) == 0) {
      for (unsigned i = 0; i < all->dls_cnt; ++i) folders.emplace_back(all->dls_serpath[i].dls_name);
    }
  }
  dlclose(handle);
}

// Adds the folders that ldconfig reads, because its cache has no public interface.
void add_configured_paths(std::vector<std::string>& folders) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/etc/ld.so.conf.d", ignored)) {
    std::ifstream file(entry.path());
    for (std::string text; std::getline(file, text);) {
      if (!text.empty() && text[0] == '/') folders.push_back(text);
    }
  }
}

std::vector<std::string> candidates(std::string& why) {
  if (std::string named = settings().nccl; !named.empty()) {
    why = why_not_loaded(&named);
    if (why.empty()) return {named};
    why = "MOECCL_SHIM_NCCL is not loaded: " + why;
    return {};
  }
  std::vector<std::string> folders;
  add_needers(folders);
  add_linker_paths(folders);
  add_configured_paths(folders);
  for (const char* usual : {"/usr/local/cuda/lib64", "/usr/local/cuda/lib", "/usr/local/lib"}) folders.push_back(usual);
  std::vector<std::string> files;
  std::set<std::string> seen;
  for (const std::string& folder : folders) {
    std::error_code failed;
    const auto real = std::filesystem::canonical(std::filesystem::path(folder) / kFile, failed);
    if (!failed && seen.insert(real.string()).second) files.push_back(real.string());
  }
  return files;
}

Real* open(const std::string& file, std::string& why) {
  // The library's own scope comes first: NCCL calls some of its public functions by name, and must find its own and not
  // the shim's. AddressSanitizer does not allow that flag; then InReal alone keeps them apart.
  const int own_first = dlsym(RTLD_DEFAULT, "__asan_init") == nullptr ? RTLD_DEEPBIND : 0;
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | own_first);
  if (handle == nullptr) {
    why = dlerror();
    return nullptr;
  }
  if (dlsym(handle, MOECCL_NCCL_MARKER) != nullptr) {
    why = file + " is this shim";
    dlclose(handle);
    return nullptr;
  }
  auto real = std::make_unique<Real>();
  real->path = file;
#define RESOLVE(result, name, parameters, arguments, failure) \
  real->call.name = reinterpret_cast<decltype(real->call.name)>(dlsym(handle, "nccl" #name));
#define NCCL_FUNCTION RESOLVE
#define NCCL_DEVICE_FUNCTION RESOLVE
#include "shim/nccl/functions.def"
#undef NCCL_DEVICE_FUNCTION
#undef NCCL_FUNCTION
#undef RESOLVE
  if (real->call.GetVersion == nullptr || real->call.GetVersion(&real->version) != ncclSuccess) {
    why = file + " is no NCCL";
    dlclose(handle);
    return nullptr;
  }
  return real.release();
}

struct Search {
  const Real* real = nullptr;
  std::string why;
};

Search search() {
  Search s;
  const InReal inside;
  for (const std::string& file : candidates(s.why)) {
    std::string why;
    s.real = open(file, why);
    if (s.real != nullptr) break;
    s.why += (s.why.empty() ? "" : "; ") + why;
  }
  if (s.real == nullptr) {
    s.why = "no usable " + std::string(kFile) + " was found" + (s.why.empty() ? "" : " (" + s.why + ")") +
            ": name the file in MOECCL_SHIM_NCCL";
  }
  open_real.store(s.real, std::memory_order_release);  // acquired in real_if_open()
  return s;
}

}  // namespace

thread_local int InReal::depth_ = 0;

const Real* real_nccl(std::string* why) {
  static const auto* const found = new Search(search());  // never destroyed, as the library is never closed
  if (found->real == nullptr && why != nullptr) *why = found->why;
  return found->real;
}

const Real* real_if_open() { return open_real.load(std::memory_order_acquire); }

}  // namespace moeccl::shim
