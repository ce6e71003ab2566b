// SPDX-License-Identifier: Apache-2.0
// Structs and tensors that a program passes.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "shim/nccl_ep/report.h"

namespace moeccl::shim::ep {

// Takes over the fields that this library and the program both know; the others are 0. `least` is the size of the
// struct in API version 1. NULL is allowed where `optional`, and leaves zeros.
template <class T>
ncclResult_t take(const char* function, const char* argument, const T* given, unsigned least, bool optional, T* out) {
  *out = {};
  const std::string where = std::string(function) + ": " + argument;
  if (given == nullptr)
    return optional ? ncclSuccess : fail(ncclInvalidArgument, where + " is NULL: give the address of a struct");
  if (given->size < least)
    return fail(ncclInvalidArgument, where + "->size is " + std::to_string(given->size) + ", less than the " +
                                         std::to_string(least) +
                                         " bytes of API version 1: assign its _INIT macro first");
  if (given->magic != NCCL_EP_MAGIC)
    return fail(ncclInvalidArgument, where + "->magic is wrong: assign the struct's _INIT macro first");
  std::memcpy(out, given, std::min<size_t>(given->size, sizeof(T)));
  return ncclSuccess;
}

// A program's tensor, with its memory found.
struct Tensor {
  const char* name = "";
  void* data = nullptr;  // may be null without elements
  ncclDataType_t type = ncclInt8;
  std::vector<size_t> sizes;
  bool given = false, in_window = false;

  explicit operator bool() const { return given; }
  size_t rows() const { return sizes.empty() ? 0 : sizes[0]; }
  size_t elements() const {
    size_t n = 1;
    for (const size_t s : sizes) n *= s;
    return n;
  }
};

// Returns the bytes of one element; 0 for a type that does not exist.
size_t type_size(ncclDataType_t type);
std::string shape_text(const std::vector<size_t>& sizes);

// Makes and frees the descriptors of ncclEpTensorAlloc.
ncclResult_t make_tensor(ncclEpTensor_t** out, unsigned ndim, ncclDataType_t type, const size_t* sizes,
                         const ncclEpTensorAllocConfig_t* config);
ncclResult_t free_tensor(ncclEpTensor_t* tensor);

// Reads tensors of one call.
class Tensors {
 public:
  Tensors(const char* function, ncclComm_t comm) : function_(function), comm_(comm) {}
  const char* function() const { return function_; }
  // NULL is allowed and leaves *out not given.
  ncclResult_t read(const char* name, const ncclEpTensor_t* tensor, Tensor* out) const;
  ncclResult_t need(const char* name, const ncclEpTensor_t* tensor, Tensor* out) const;
  // Returns InvalidArgument with a sentence about this tensor, or about what is wrong in general.
  ncclResult_t refuse(const Tensor& tensor, const std::string& why) const;
  ncclResult_t refuse(const std::string& why) const;
  ncclResult_t refuse_if_given(const Tensor& tensor, const char* why) const;
  // Checks type and shape; a size of kAny may be anything.
  static constexpr size_t kAny = ~size_t{0};
  ncclResult_t check(const Tensor& tensor, std::initializer_list<ncclDataType_t> types,
                     const std::vector<size_t>& sizes) const;

 private:
  const char* function_;
  ncclComm_t comm_;
};

}  // namespace moeccl::shim::ep
