// SPDX-License-Identifier: Apache-2.0
// The profile as a file: versioned JSON that people can read and edit, with units in its names (docs/calibration.md).
#pragma once

#include <string>
#include <string_view>

#include "src/plan/profile.h"

namespace moeccl::plan {

inline constexpr int kProfileVersion = 1;
inline constexpr size_t kMaxProfileBytes = 4u << 20;  // ten times what calibration writes for the widest topology

std::string write_profile(const Profile& profile, const std::string& note, const std::string& topology);
// Reports every mistake as an error with `source`, line and column: syntax, an unknown field, a value out of its range,
// points that do not ascend. Fields that the file does not name keep their values from `base`.
Result<Profile> read_profile(std::string_view text, const std::string& source, const Profile& base = {});

// Fails for a profile whose levels are not those of `tree`; the message says what does not fit. Its links and machine
// figures may still be used for what has the same levels.
Status profile_fits(const Profile& profile, const LevelTree& tree);

}  // namespace moeccl::plan
