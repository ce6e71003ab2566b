// SPDX-License-Identifier: Apache-2.0
// XLA's side of its foreign function interface: makes call frames as XLA does and keeps the errors of handlers.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bindings/jax/abi.h"

// What XLA keeps behind the two opaque pointers.
struct XLA_FFI_Error {
  XLA_FFI_Error(std::string text, XLA_FFI_Error_Code errc) : message(std::move(text)), code(errc) { ++alive; }
  ~XLA_FFI_Error() { --alive; }
  std::string message;
  XLA_FFI_Error_Code code;
  static inline std::atomic<int> alive{0};
};
struct XLA_FFI_ExecutionContext {
  void* stream;
  std::string lost;  // why XLA has no stream, if it has none
};

namespace moeccl::testing {

// The library of handlers, opened as moeccl.jax does.
template <typename Function>
Function* jax_function(const std::string& name) {
  static void* const library = dlopen(std::getenv("MOECCL_TEST_JAX"), RTLD_NOW | RTLD_LOCAL);
  void* const found = library == nullptr ? nullptr : dlsym(library, ("moecclJax" + name).c_str());
  if (found == nullptr) {  // every test needs it
    std::fprintf(stderr, "MOECCL_TEST_JAX names no library with moecclJax%s: %s\n", name.c_str(), dlerror());
    std::exit(1);
  }
  return reinterpret_cast<Function*>(found);
}
using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

struct Outcome {
  bool ok = true;
  int code = 0;
  std::string message;
};

// One call: arguments and results in order, then run().
class XlaCall {
 public:
  explicit XlaCall(void* stream = nullptr, std::string lost = "") : context_{stream, std::move(lost)} {
    api_.struct_size = sizeof api_;
    api_.api_version = {sizeof api_.api_version, nullptr, 0, 3};
    api_.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message, args->errc};
    };
    api_.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = args->error->message.c_str();
    };
    api_.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    api_.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = args->ctx->stream;
      if (!args->ctx->lost.empty()) return new XLA_FFI_Error{args->ctx->lost, XLA_FFI_Error_Code_UNAVAILABLE};
      return nullptr;
    };
  }

  void version(int major, int minor) {
    api_.api_version.major_version = major;
    api_.api_version.minor_version = minor;
  }
  // JAX passes a token first when calls are ordered.
  XlaCall& token() {
    add(args_, nullptr, XLA_FFI_DataType_TOKEN, {});
    add(rets_, nullptr, XLA_FFI_DataType_TOKEN, {});
    return *this;
  }
  XlaCall& in(const void* data, XLA_FFI_DataType type, std::vector<int64_t> dims) {
    return add(args_, const_cast<void*>(data), type, std::move(dims));
  }
  XlaCall& out(void* data, XLA_FFI_DataType type, std::vector<int64_t> dims) {
    return add(rets_, data, type, std::move(dims));
  }
  XlaCall& attribute(const std::string& name, int64_t value) {
    attributes_[name] = value;
    return *this;
  }

  Outcome run(const std::string& name, XLA_FFI_ExecutionStage stage = XLA_FFI_ExecutionStage_EXECUTE) {
    Frame frame(*this);
    frame.frame.stage = stage;
    const std::unique_ptr<XLA_FFI_Error> error(jax_function<Handler>(name)(&frame.frame));
    return error == nullptr ? Outcome{} : Outcome{false, error->code, error->message};
  }
  // Asks for metadata, as XLA does when a handler is registered.
  XLA_FFI_Metadata metadata(const std::string& name, bool with_api = true) {
    Frame frame(*this);
    XLA_FFI_Metadata metadata{sizeof metadata, {sizeof(XLA_FFI_Api_Version), nullptr, -1, -1}, ~0u};
    XLA_FFI_Metadata_Extension extension{{sizeof extension, XLA_FFI_Extension_Metadata, nullptr}, &metadata};
    frame.frame.extension_start = &extension.extension_base;
    if (!with_api) frame.frame.api = nullptr;
    EXPECT_EQ(jax_function<Handler>(name)(&frame.frame), nullptr);
    return metadata;
  }

 private:
  struct Array {
    std::vector<int64_t> dims;
    XLA_FFI_Buffer buffer;
  };
  using Arrays = std::vector<std::unique_ptr<Array>>;

  XlaCall& add(Arrays& to, void* data, XLA_FFI_DataType type, std::vector<int64_t> dims) {
    to.push_back(std::make_unique<Array>(Array{std::move(dims), {}}));
    Array& made = *to.back();
    made.buffer = {sizeof made.buffer, nullptr, type, data, static_cast<int64_t>(made.dims.size()), made.dims.data()};
    return *this;
  }

  // The arrays of pointers of a frame.
  struct Frame {
    explicit Frame(XlaCall& call) {
      for (auto& one : call.args_) args.push_back(&one->buffer);
      for (auto& one : call.rets_) rets.push_back(&one->buffer);
      names.reserve(call.attributes_.size());
      scalars.reserve(call.attributes_.size());
      for (auto& [name, value] : call.attributes_) {
        names.push_back({name.data(), name.size()});
        scalars.push_back({XLA_FFI_DataType_S64, &value});
        name_of.push_back(&names.back());
        attributes.push_back(&scalars.back());
      }
      arg_types.assign(args.size(), XLA_FFI_ArgType_BUFFER);
      ret_types.assign(rets.size(), XLA_FFI_RetType_BUFFER);
      attribute_types.assign(attributes.size(), XLA_FFI_AttrType_SCALAR);
      frame = {sizeof frame, nullptr, &call.api_, &call.context_, XLA_FFI_ExecutionStage_EXECUTE, {}, {}, {}};
      frame.args = {sizeof frame.args, nullptr, static_cast<int64_t>(args.size()), arg_types.data(), args.data()};
      frame.rets = {sizeof frame.rets, nullptr, static_cast<int64_t>(rets.size()), ret_types.data(), rets.data()};
      frame.attrs = {sizeof frame.attrs,     nullptr,        static_cast<int64_t>(attributes.size()),
                     attribute_types.data(), name_of.data(), attributes.data()};
    }
    std::vector<void*> args, rets, attributes;
    std::vector<XLA_FFI_ByteSpan> names;
    std::vector<XLA_FFI_Scalar> scalars;
    std::vector<XLA_FFI_ByteSpan*> name_of;
    std::vector<XLA_FFI_ArgType> arg_types;
    std::vector<XLA_FFI_RetType> ret_types;
    std::vector<XLA_FFI_AttrType> attribute_types;
    XLA_FFI_CallFrame frame;
  };

  XLA_FFI_Api api_{};
  XLA_FFI_ExecutionContext context_;
  Arrays args_, rets_;
  std::map<std::string, int64_t> attributes_;
};

}  // namespace moeccl::testing
