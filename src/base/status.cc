// SPDX-License-Identifier: Apache-2.0
#include "src/base/status.h"

#include <cerrno>
#include <new>
#include <system_error>

namespace moeccl {

Status Status::out_of_memory() noexcept {
  // Created when the library is loaded and never destroyed, because threads may still fail while the process ends.
  static Rep* const rep = new Rep{moecclOutOfMemory, "the process has no memory left", true};
  Status status;
  status.rep_.reset(rep);
  return status;
}

namespace {
const Status kMadeAtLoad = Status::out_of_memory();
}  // namespace

Status caught(const std::exception& thrown) noexcept {
  if (dynamic_cast<const std::bad_alloc*>(&thrown) != nullptr) return Status::out_of_memory();
  try {
    if (const auto* s = dynamic_cast<const std::system_error*>(&thrown); s != nullptr)
      return Status(moecclSystemError, s->what());
    return error(moecclInternalError, "unexpected: {}", thrown.what());
  } catch (const std::exception&) {
    return Status::out_of_memory();
  }
}

Status system_error(const std::string& what, int error_number) {
  const Code code = error_number == ENOMEM ? moecclOutOfMemory : moecclSystemError;
  const char* remedy = "";
  if (error_number == EMFILE)
    remedy =
        ": this process may not open more files; raise the limit, also the hard one (ulimit -n). Each communicator "
        "takes up to 16 for each rank of another host, with CUDA memory up to 48";
  if (error_number == ENFILE) remedy = ": the machine's table of open files is full (fs.file-max)";
  return Status(code, what + ": " + std::generic_category().message(error_number) + remedy);
}

}  // namespace moeccl
