#include "listing.h"

#include <initializer_list>
#include <utility>

namespace kvjax {
namespace {

std::string Object(std::initializer_list<std::pair<const char*, std::string>> fields) {
  std::string text;
  for (const auto& [name, value] : fields) {
    text += (text.empty() ? "{\"" : ", \"") + std::string(name) + "\": " + value;
  }
  return text + "}";
}

std::string Text(int64_t number) { return std::to_string(number); }

std::string Text(const Span& span) {
  return Object({{"seq", Text(span.seq)},
                 {"first_block", Text(span.first_block)},
                 {"num_blocks", Text(span.num_blocks)},
                 {"first_cell", Text(span.first_cell)},
                 {"end_cell", Text(span.end_cell)},
                 {"offset", Text(span.offset)},
                 {"first", Text(span.first)},
                 {"last", Text(span.last)}});
}

std::string Text(const Copy& copy) {
  return Object({{"source", Text(copy.source)},
                 {"target", Text(copy.target)},
                 {"width", Text(copy.width)},
                 {"height", Text(copy.height)},
                 {"source_pitch", Text(copy.source_pitch)},
                 {"target_pitch", Text(copy.target_pitch)}});
}

std::string Text(const Segment& segment);

template <typename T>
std::string Text(const std::vector<T>& items) {
  std::string text;
  for (const T& item : items) text += (text.empty() ? "" : ", ") + Text(item);
  return "[" + text + "]";
}

std::string Text(const Segment& segment) {
  return Object({{"spans", Text(segment.spans)},
                 {"copies", Text(segment.copies)},
                 {"live_bytes", Text(segment.live_bytes)},
                 {"gap_bytes", Text(segment.gap_bytes)}});
}

}  // namespace

std::string Listing(const std::vector<Span>& resident,
                    const std::vector<Segment>& segments) {
  return Object({{"resident", Text(resident)}, {"segments", Text(segments)}});
}

}  // namespace kvjax
