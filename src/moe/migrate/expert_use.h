// SPDX-License-Identifier: Apache-2.0
// The program's functions of moeccl/codec.h that run inside the codec: an optimizer's step, an expert's computation.
#pragma once

#include "kernels/codec.h"
#include "moeccl/codec.h"
#include "src/base/status.h"

namespace moeccl::comm {

// An update that remembers where it was stopped.
class ExpertUpdate {
 public:
  ExpertUpdate(moecclExpertUpdateFn_t update, void* context) : update_(update), context_(context) {}
  // Refers to this object.
  kernels::CodecUpdate function();
  bool stopped() const { return result_ != 0; }
  // remedy: what the caller does with what is left.
  Status status(const char* remedy) const;

 private:
  moecclExpertUpdateFn_t update_;
  void* context_;
  uint32_t expert_ = 0;
  int result_ = 0;
  uint64_t first_ = 0, count_ = 0;
};
// unfused: the function that takes no update.
Status check_update(moecclExpertUpdateFn_t update, const char* unfused);

// A use of an expert of so many elements.
class ExpertUse {
 public:
  static Result<ExpertUse> create(const moecclExpertUse_t* given, uint64_t count);
  const kernels::CodecRange& range() const { return range_; }
  // Refers to this object.
  kernels::CodecUse function();
  // Of the computation: what stopped it.
  Status status() const;

 private:
  kernels::CodecRange range_;
  moecclExpertUseFn_t use_ = nullptr;
  void* context_ = nullptr;
  int result_ = 0;
  uint64_t first_ = 0, count_ = 0;
};

}  // namespace moeccl::comm
