// SPDX-License-Identifier: Apache-2.0
// What the configs of migrate.h and gradient.h have in common: layers of experts of one shape, and the codec's ratio.
#pragma once

#include <cstdint>

#include "kernels/codec.h"
#include "src/base/adopt.h"
#include "src/moe/hybrid.h"

namespace moeccl::comm {

// Returns the config with its defaults, or an error that names the field, its value and the values that are accepted.
template <class Config>
Result<Config> checked_codec_config(const Config* given) {
  constexpr double kDefaultRatio = 50;  // from the paper
  constexpr int32_t kMostLayers = 4096;
  MOECCL_ASSIGN_OR_RETURN(Config c, adopt(given, "config"));
  if (c.ratio == 0) c.ratio = kDefaultRatio;
  if (c.n_layers == 0) c.n_layers = 1;
  if (!(c.ratio >= 1 && c.ratio <= 1e6))
    return error(moecclInvalidArgument, "config.ratio is {}: give 1 (exact) to 1e6, or 0 for {}", c.ratio,
                 kDefaultRatio);
  if (moecclTypeSize(c.type) == 0 || (c.ratio > 1 && !kernels::codec_supports(c.type)))
    return error(moecclInvalidArgument, "config.type is {}: give moecclFloat32 or moecclBfloat16, or ratio 1",
                 static_cast<int>(c.type));
  if (c.count > kMostExpertElements)
    return error(moecclInvalidArgument, "config.count is {}: an expert has at most 2^36 elements", c.count);
  if (c.n_layers < 1 || c.n_layers > kMostLayers)
    return error(moecclInvalidArgument, "config.n_layers is {}: give 1 to {}", c.n_layers, kMostLayers);
  return c;
}

// Returns the experts' homes and domains as a field that ranks compare.
inline double placement_field(const Hybrid& hybrid) {
  return static_cast<double>(hybrid.hash() >> 12);  // as many bits as a double holds
}

}  // namespace moeccl::comm
