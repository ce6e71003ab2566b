#include "src/base/format.h"

#define FMT_HEADER_ONLY 1
#include <fmt/format.h>

namespace moeccl {

std::string format_args_to_string(fmt::string_view text, fmt::format_args args) { return fmt::vformat(text, args); }

}  // namespace moeccl
