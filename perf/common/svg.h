// SPDX-License-Identifier: Apache-2.0
// Small charts as SVG text, without a library.
#ifndef PERF_COMMON_SVG_H_
#define PERF_COMMON_SVG_H_

#include <string>
#include <vector>

namespace perf {

struct Series {
  std::string name;
  std::vector<double> x, y;
  bool joined = true;  // false: dots without a line
};
// Lines over two axes that begin where the data begins. An axis is logarithmic, except that it is linear where its
// values lie within a factor of ten and are not bytes. Points that are not positive are left out.
struct LineChart {
  std::string title, x_label, y_label;
  bool x_is_bytes = true;
  std::vector<Series> series;
};

// Groups of bars over a linear axis from 0: values[series][category].
struct BarChart {
  std::string title, y_label;
  std::vector<std::string> categories;
  std::vector<std::string> series;
  std::vector<std::vector<double>> values;
};

// Returns a page with the charts below each other, under one heading. `note` is small print.
std::string svg_page(const std::string& heading, const std::string& note, const std::vector<LineChart>& lines,
                     const std::vector<BarChart>& bars);

}  // namespace perf

#endif  // PERF_COMMON_SVG_H_
