// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl_ep/structs.h"

#include <memory>

namespace moeccl::shim::ep {
namespace {

// A descriptor that TensorAlloc has made: the program may write to its fields, but not put another array in place of
// its sizes.
struct Made {
  size_t* sizes;
  ncclEpTensor_t tensor;
};
constexpr unsigned kMadeMagic = 0x4d6f4550;

Made* made_of(const ncclEpTensor_t* tensor) {
  auto* const at = reinterpret_cast<char*>(const_cast<ncclEpTensor_t*>(tensor));
  return reinterpret_cast<Made*>(at - offsetof(Made, tensor));
}

bool is_initialised(const ncclEpTensor_t& t) {
  if (t.size < NCCL_EP_TENSOR_V1_SIZE) return false;
  if (t.magic == NCCL_EP_TENSOR_MAGIC) return true;
  return t.magic == kMadeMagic && made_of(&t)->sizes == t.sizes;
}

}  // namespace

size_t type_size(ncclDataType_t type) {
  return static_cast<int>(type) == MOECCL_NCCL_FLOAT4X2 ? 1 : moecclTypeSize(static_cast<moecclDataType_t>(type));
}

std::string shape_text(const std::vector<size_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i)
    text += (i > 0 ? ", " : "") + (sizes[i] == Tensors::kAny ? std::string("any") : std::to_string(sizes[i]));
  return text + "]";
}

ncclResult_t Tensors::read(const char* name, const ncclEpTensor_t* tensor, Tensor* out) const {
  *out = {};
  out->name = name;
  if (tensor == nullptr) return ncclSuccess;
  if (!is_initialised(*tensor))
    return refuse(*out,
                  "is not initialised: assign NCCL_EP_TENSOR_INIT, or take it from ncclEpTensorAlloc and leave its "
                  "sizes pointer as it is");
  if (tensor->ndim == 0 || tensor->sizes == nullptr) return refuse(*out, "has no sizes: set ndim and sizes");
  out->given = true;
  out->type = tensor->datatype;
  out->sizes.assign(tensor->sizes, tensor->sizes + tensor->ndim);
  out->data = tensor->data;
  out->in_window = tensor->win_hdl != nullptr;
  if (out->data != nullptr || out->elements() == 0) return ncclSuccess;
  if (!out->in_window) return refuse(*out, "has no memory: set data, or win_hdl and win_offset");
  MOECCL_EP_TRY(hooks()->window(comm_, tensor->win_hdl, &out->data));
  out->data = static_cast<char*>(out->data) + tensor->win_offset;
  return ncclSuccess;
}

ncclResult_t Tensors::need(const char* name, const ncclEpTensor_t* tensor, Tensor* out) const {
  MOECCL_EP_TRY(read(name, tensor, out));
  return out->given ? ncclSuccess : refuse(*out, "is NULL: this call needs it");
}

ncclResult_t Tensors::refuse(const Tensor& tensor, const std::string& why) const {
  return refuse(std::string(tensor.name) + " " + why);
}
ncclResult_t Tensors::refuse(const std::string& why) const {
  return fail(ncclInvalidArgument, std::string(function_) + ": " + why);
}
ncclResult_t Tensors::refuse_if_given(const Tensor& tensor, const char* why) const {
  return tensor.given ? refuse(tensor, std::string("must be NULL ") + why) : ncclSuccess;
}

ncclResult_t Tensors::check(const Tensor& tensor, std::initializer_list<ncclDataType_t> types,
                            const std::vector<size_t>& sizes) const {
  bool type_fits = types.size() == 0, shape_fits = tensor.sizes.size() == sizes.size();
  std::string names;
  for (const ncclDataType_t type : types) {
    type_fits |= tensor.type == type;
    names += (names.empty() ? "" : " or ") + std::string(moecclTypeName(static_cast<moecclDataType_t>(type)));
  }
  for (size_t i = 0; i < sizes.size() && shape_fits; ++i) shape_fits = sizes[i] == kAny || sizes[i] == tensor.sizes[i];
  if (!type_fits)
    return refuse(tensor, "is of type " + std::to_string(static_cast<int>(tensor.type)) + ": give " + names);
  if (!shape_fits) return refuse(tensor, "is " + shape_text(tensor.sizes) + ": give " + shape_text(sizes));
  return ncclSuccess;
}

ncclResult_t make_tensor(ncclEpTensor_t** out, unsigned ndim, ncclDataType_t type, const size_t* sizes,
                         const ncclEpTensorAllocConfig_t* config) {
  constexpr const char* kName = "ncclEpTensorAlloc";
  ncclEpTensorAllocConfig_t known;
  MOECCL_EP_TRY(take(kName, "config", config, NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE, true, &known));
  if (out == nullptr || sizes == nullptr || ndim == 0)
    return fail(ncclInvalidArgument, std::string(kName) + ": " +
                                         (out == nullptr     ? "tensor is NULL: give the address of a pointer"
                                          : sizes == nullptr ? "sizes is NULL: give an array of ndim sizes"
                                                             : "ndim is 0: give at least 1"));
  auto kept = std::make_unique<size_t[]>(ndim);
  std::copy_n(sizes, ndim, kept.get());
  auto* const made = new Made{kept.release(), {}};
  made->tensor = {sizeof(ncclEpTensor_t), kMadeMagic, ndim, type, nullptr, nullptr, 0, made->sizes};
  *out = &made->tensor;
  return ncclSuccess;
}

ncclResult_t free_tensor(ncclEpTensor_t* tensor) {
  if (tensor == nullptr) return ncclSuccess;
  if (tensor->magic != kMadeMagic || !is_initialised(*tensor))
    return fail(ncclInvalidArgument,
                "ncclEpTensorDestroy: tensor is none that ncclEpTensorAlloc made, or its sizes pointer was replaced");
  delete[] made_of(tensor)->sizes;
  delete made_of(tensor);
  return ncclSuccess;
}

}  // namespace moeccl::shim::ep
