#include "src/base/status.h"

#include <cerrno>
#include <system_error>

namespace moeccl {

Status system_error(const std::string& what, int error_number) {
  const Code code = error_number == ENOMEM ? moecclOutOfMemory : moecclSystemError;
  return Status(code, what + ": " + std::generic_category().message(error_number));
}

}  // namespace moeccl
