// Spans, copies and segments as JSON, for tests that draw them.
#pragma once

#include <string>
#include <vector>

#include "ranges.h"

namespace kvjax {

std::string Listing(const std::vector<Span>& resident,
                    const std::vector<Segment>& segments);

}  // namespace kvjax
