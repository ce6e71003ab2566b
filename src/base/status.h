// SPDX-License-Identifier: Apache-2.0
// Errors are values that carry a sentence: what was tried, on what, and what to do about it.
#pragma once

#include <cassert>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "moeccl/types.h"
#include "src/base/format.h"

namespace moeccl {

using Code = moecclResult_t;

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  Status(Code code, std::string message) : rep_(new Rep{code, std::move(message)}) {}
  Status(const Status& other) : rep_(other.copied()) {}
  Status(Status&&) noexcept = default;
  Status& operator=(const Status& other) {
    if (this != &other) rep_.reset(other.copied());
    return *this;
  }
  Status& operator=(Status&&) noexcept = default;

  // Returns the failure of a process without memory. Neither it nor its copies allocate.
  static Status out_of_memory() noexcept;

  bool ok() const { return rep_ == nullptr; }
  Code code() const { return rep_ ? rep_->code : moecclSuccess; }
  const std::string& message() const {
    static const std::string empty;
    return rep_ ? rep_->message : empty;
  }
  // Returns the same failure with "where: " in front of its sentence.
  Status with_context(const std::string& where) && {
    if (rep_) *this = Status(rep_->code, where + ": " + rep_->message);
    return std::move(*this);
  }

 private:
  struct Rep {
    Code code;
    std::string message;
    bool shared = false;  // true for the one of out_of_memory()
  };
  struct Delete {
    void operator()(Rep* rep) const {
      if (!rep->shared) delete rep;
    }
  };
  Rep* copied() const { return rep_ == nullptr || rep_->shared ? rep_.get() : new Rep(*rep_); }

  std::unique_ptr<Rep, Delete> rep_;  // null on success, so that success costs one pointer
};

template <class... Args>
Status error(Code code, fmt::format_string<Args...> text, Args&&... args) {
  return Status(code, format_args_to_string(text, fmt::make_format_args(args...)));
}

// Returns "what: strerror(errno)" as moecclSystemError, or as moecclOutOfMemory for ENOMEM.
Status system_error(const std::string& what, int error_number);

// Turns a caught exception into a Status. MoECCL itself throws nothing, but the standard library does.
Status caught(const std::exception& thrown) noexcept;
// Runs `body` (which returns a Status) and lets no exception out of it. Used at every thread's entry and wherever
// something must be left in order.
template <class Body>
Status contained(Body&& body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return caught(e);
  }
}

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}                                  // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) { assert(!status_.ok()); }  // NOLINT: implicit by design

  bool ok() const { return status_.ok(); }
  const Status& status() const& { return status_; }
  Status&& status() && { return std::move(status_); }
  T& value() {
    assert(ok());
    return *value_;
  }
  const T& value() const {
    assert(ok());
    return *value_;
  }
  T& operator*() { return value(); }
  T* operator->() { return &value(); }
  const T& operator*() const { return value(); }
  const T* operator->() const { return &value(); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace moeccl

#define MOECCL_CONCAT_(a, b) a##b
#define MOECCL_CONCAT(a, b) MOECCL_CONCAT_(a, b)

// Returns the failure of an expression of type Status.
#define MOECCL_TRY(expr)                                                  \
  do {                                                                    \
    if (::moeccl::Status status_ = (expr); !status_.ok()) return status_; \
  } while (0)

// Assigns the value of a Result, or returns its failure.
#define MOECCL_ASSIGN_OR_RETURN(lhs, expr) MOECCL_ASSIGN_OR_RETURN_(MOECCL_CONCAT(result_, __LINE__), lhs, expr)
#define MOECCL_ASSIGN_OR_RETURN_(tmp, lhs, expr) \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = std::move(tmp.value())
