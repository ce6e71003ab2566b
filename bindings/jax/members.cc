// SPDX-License-Identifier: Apache-2.0
#include "bindings/jax/members.h"

namespace moeccl::jax {

Numbered<Member>& members() {
  // Never destroyed: XLA's threads may run a program while the process ends.
  static auto& all = *new Numbered<Member>;
  return all;
}

Outcome member_of(const Call& call, std::shared_ptr<Member>* member) {
  int64_t number = 0;
  if (Outcome failed = call.attribute("comm", &number)) return failed;
  *member = members().find(number);
  if (*member != nullptr) return {};
  return Failure{XLA_FFI_Error_Code_FAILED_PRECONDITION,
                 "communicator " + std::to_string(number) +
                     " of this program is closed: make the program anew with an open communicator"};
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

// Call it when the communicator is closed; programs with its number get an error from then on.
extern "C" MOECCL_API void moecclJaxRemoveComm(int64_t number) { moeccl::jax::members().remove(number); }
