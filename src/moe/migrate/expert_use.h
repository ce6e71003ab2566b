// SPDX-License-Identifier: Apache-2.0
// The caller's functions in moeccl/codec.h that run inside the codec: an optimizer's step and an expert's computation.
#pragma once

#include "kernels/codec.h"
#include "moeccl/codec.h"
#include "src/base/status.h"

namespace moeccl::comm {

// Remembers where an update stopped.
class ExpertUpdate {
 public:
  ExpertUpdate(moecclExpertUpdateFn_t update, void* context) : update_(update), context_(context) {}
  // The result refers to this object.
  kernels::CodecUpdate function();
  bool stopped() const { return result_ != 0; }
  // `remedy` tells the caller how to finish the elements that are left.
  Status status(const char* remedy) const;

 private:
  moecclExpertUpdateFn_t update_;
  void* context_;
  uint32_t expert_ = 0;
  int result_ = 0;
  uint64_t first_ = 0, count_ = 0;
};
// `unfused` names the function that takes no update.
Status check_update(moecclExpertUpdateFn_t update, const char* unfused);

// A use of an expert with `count` elements.
class ExpertUse {
 public:
  static Result<ExpertUse> create(const moecclExpertUse_t* given, uint64_t count);
  const kernels::CodecRange& range() const { return range_; }
  // The result refers to this object.
  kernels::CodecUse function();
  // Returns the error of the computation if it stopped.
  Status status() const;

 private:
  kernels::CodecRange range_;
  moecclExpertUseFn_t use_ = nullptr;
  void* context_ = nullptr;
  int result_ = 0;
  uint64_t first_ = 0, count_ = 0;
};

}  // namespace moeccl::comm
