// SPDX-License-Identifier: Apache-2.0
// Files that the user names.
#pragma once

#include <string>
#include <string_view>

#include "src/base/status.h"

namespace moeccl::driver {

// Makes `text` the whole content of the file at `path`: written beside it and renamed, so that no reader sees half of
// it and a failure leaves what was there, with its permissions. A symbolic link is followed, also one whose target is
// yet to be made. moecclInvalidArgument for what is no plain file: a device, a pipe, a folder.
Status replace_file(const std::string& path, std::string_view text);

}  // namespace moeccl::driver
