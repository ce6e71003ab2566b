// SPDX-License-Identifier: Apache-2.0
// Files that the user names.
#pragma once

#include <string>
#include <string_view>

#include "src/base/status.h"

namespace moeccl::driver {

// Makes `text` the whole content of the file at `path`. The text is written to a temporary file in the same folder,
// which is then renamed. No reader therefore sees half of it, and a failure leaves the old file as it was; the file's
// permissions are kept. A symbolic link is followed, even if its target does not exist yet. Returns
// moecclInvalidArgument for anything but a plain file, such as a device, a pipe or a folder.
Status replace_file(const std::string& path, std::string_view text);

// Makes an empty file and returns its name: `path`, or where that is taken, with a number before its ".json", if it has
// one, else at the end. Containers may have equal host names and processes' numbers.
Result<std::string> make_file(const std::string& path);
// Adds to the name of a file, before its ".json".
std::string with_ending(const std::string& path, const std::string& ending);

// Returns why this process may make no file in the folder of `path`, or success. Nothing is made.
Status check_folder_of(const std::string& path);

// Reads a file of at most 256 MiB as text; an error names the file. InvalidArgument for anything but a plain file: a
// device or a pipe may have no end.
Result<std::string> read_file(const std::string& path);

}  // namespace moeccl::driver
