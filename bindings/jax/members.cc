// SPDX-License-Identifier: Apache-2.0
#include "bindings/jax/members.h"

namespace moeccl::jax {

Numbered<Member>& members() {
  // Never destroyed: XLA's threads may run a program while the process ends.
  static auto& all = *new Numbered<Member>;
  return all;
}

Outcome member_of(const Call& call, std::shared_ptr<Member>* member, std::unique_lock<std::mutex>* lock) {
  int64_t number = 0;
  if (Outcome failed = call.attribute("comm", &number)) return failed;
  *member = members().find(number);
  if (*member != nullptr) {
    *lock = std::unique_lock((*member)->busy);
    if (!(*member)->closed) return {};
  }
  return closed("communicator " + std::to_string(number), "communicator");
}

Failure closed(const std::string& thing, const std::string& kind) {
  // JAX keeps what it traced from a function, also for a new jax.jit of the same function.
  return {XLA_FFI_Error_Code_FAILED_PRECONDITION,
          thing + " of this program is closed: make the program anew with an open " + kind +
              ", from a new function or after jax.clear_caches()"};
}

}  // namespace moeccl::jax

// Returns the number of a communicator for programs; 0 without memory.
extern "C" MOECCL_API int64_t moecclJaxAddComm(moecclComm_t comm) {
  try {
    return moeccl::jax::members().add(std::make_shared<moeccl::jax::Member>(comm));
  } catch (const std::exception&) {
    return 0;
  }
}

// Call it before the communicator is destroyed. It waits for a call that runs; later calls with the number fail.
extern "C" MOECCL_API void moecclJaxRemoveComm(int64_t number) {
  const std::shared_ptr<moeccl::jax::Member> member = moeccl::jax::members().remove(number);
  if (member == nullptr) return;
  const std::lock_guard lock(member->busy);
  member->closed = true;
}
