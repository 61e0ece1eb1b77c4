// The outcome of a native call: success, or a kind and a sentence for the user.
#pragma once

#include <string>
#include <utility>

namespace kvjax {

enum class StatusCode { kOk, kInvalid, kExhausted, kInternal };

struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }

  static Status Ok() { return {}; }
  static Status Invalid(std::string text) {
    return {StatusCode::kInvalid, std::move(text)};
  }
  static Status Exhausted(std::string text) {
    return {StatusCode::kExhausted, std::move(text)};
  }
  static Status Internal(std::string text) {
    return {StatusCode::kInternal, std::move(text)};
  }
};

}  // namespace kvjax

#define KVJAX_RETURN_IF_ERROR(expr)              \
  do {                                           \
    ::kvjax::Status kvjax_status = (expr);       \
    if (!kvjax_status.ok()) return kvjax_status; \
  } while (0)
