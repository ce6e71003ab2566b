// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/aside.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "src/driver/cuda/streams.h"
#include "src/driver/fork_page.h"

namespace moeccl::driver::cuda {

namespace {

constexpr size_t kPieceBytes = 256 << 10;

struct Aside {
  std::mutex mutex;  // held by one piece of work at a time
  StreamOwner stream;
  Memory pinned;
};
struct Asides {
  std::mutex mutex;
  std::map<std::pair<Context, uint64_t>, Aside> of;  // by the context's address and number; never erased
};

Aside& aside_of(Context context) {
  static constinit PerProcess<Asides> own;
  const std::pair home(context, number_of(context));
  Asides& all = own.get();
  const std::lock_guard lock(all.mutex);
  return all.of[home];
}

Status make(Aside& a, Context context) {
  if (a.pinned.data() == nullptr) {
    MOECCL_ASSIGN_OR_RETURN(a.pinned, Memory::pinned(context, kPieceBytes));
  }
  // In a hardware channel shared with a program's stream, the work would come after what that stream waits for.
  MOECCL_ASSIGN_OR_RETURN(a.stream, make_first_stream());
  return {};
}

// Runs body(Aside&), which starts work on the stream, waits for that work, and runs after(Aside&).
template <class Body, class After>
Status run_aside(const std::string& what, Body&& body, After&& after) {
  const Context context = current_context();
  Aside& a = aside_of(context);
  const std::lock_guard one_at_a_time(a.mutex);
  if (a.stream == nullptr) MOECCL_TRY(make(a, context));
  MOECCL_TRY(body(a));
  MOECCL_TRY(synchronize(a.stream.get(), what));
  after(a);
  return {};
}
template <class Body>
Status run_aside(const std::string& what, Body&& body) {
  return run_aside(what, body, [](const Aside&) {});
}

}  // namespace

Status zero(Pointer at, size_t bytes) {
  constexpr const char* kWhat = "zeroing device memory";
  return run_aside(kWhat, [&](Aside& a) { return fill(reinterpret_cast<void*>(at), 0, bytes, a.stream.get(), kWhat); });
}

Status copy_aside(void* to, const void* from, size_t bytes, const std::string& what) {
  const bool down = pointed(to).type == 0, up = pointed(from).type == 0;
  if (!down && !up) return run_aside(what, [&](Aside& a) { return copy(to, from, bytes, a.stream.get(), what); });
  for (size_t at = 0, n = 0; at < bytes; at += n) {
    n = std::min(bytes - at, kPieceBytes);
    std::byte* const dst = static_cast<std::byte*>(to) + at;
    const std::byte* const src = static_cast<const std::byte*>(from) + at;
    const auto through = [&](Aside& a) {
      if (!up) return copy(a.pinned.data(), src, n, a.stream.get(), what);
      std::memcpy(a.pinned.data(), src, n);
      return copy(dst, a.pinned.data(), n, a.stream.get(), what);
    };
    MOECCL_TRY(run_aside(what, through, [&](const Aside& a) {
      if (!up) std::memcpy(dst, a.pinned.data(), n);
    }));
  }
  return {};
}

}  // namespace moeccl::driver::cuda
