// SPDX-License-Identifier: Apache-2.0
#include "perf/common/svg.h"

#include <gtest/gtest.h>

#include <cmath>

#include "perf/common/text.h"

namespace perf {
namespace {

size_t occurrences(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) n++;
  return n;
}

TEST(Svg, DrawsALineForEachSeriesAndLeavesOutWhatALogarithmCannotShow) {
  const LineChart chart = {.title = "Time & <busbw>",
                           .x_label = "size",
                           .y_label = "us",
                           .series = {{"a", {8, 64, 512}, {1, 2, 4}}, {"b", {8, 64, 512}, {0, 3, 9}}}};
  const std::string svg = svg_page("heading", "note", {chart}, {});
  EXPECT_EQ(occurrences(svg, "<polyline"), 2u);
  EXPECT_EQ(occurrences(svg, "<circle"), 5u);
  EXPECT_NE(svg.find("Time &amp; &lt;busbw&gt;"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(Svg, SeriesThatAreNotJoinedHaveDotsAlone) {
  const LineChart chart = {
      .title = "t", .x_label = "x", .y_label = "y", .series = {{"a", {8, 64, 512}, {1, 2, 4}, false}}};
  const std::string svg = svg_page("heading", "note", {chart}, {});
  EXPECT_EQ(occurrences(svg, "<polyline"), 0u);
  EXPECT_EQ(occurrences(svg, "<circle"), 3u);
}

// Returns the x of each circle.
std::vector<double> places(const std::string& svg) {
  std::vector<double> x;
  for (size_t at = svg.find("<circle cx='"); at != std::string::npos; at = svg.find("<circle cx='", at + 1))
    x.push_back(std::stod(svg.substr(at + 12)));
  return x;
}

TEST(Svg, AxesBeginAndEndWhereTheDataDoes) {
  const auto drawn = [](std::vector<double> x, bool bytes) {
    const std::vector<double> y(x.size(), 3);
    return svg_page("h", "",
                    {{.title = "t", .x_label = "x", .y_label = "y", .x_is_bytes = bytes, .series = {{"a", x, y}}}}, {});
  };
  for (const auto& [x, bytes] : {std::pair<std::vector<double>, bool>{{500, 750, 1000}, false},
                                 {{8, 64, 1024}, true},
                                 {{20, 300, 5000}, false}}) {
    const std::string svg = drawn(x, bytes);
    const std::vector<double> at = places(svg);
    ASSERT_EQ(at.size(), 3u);
    EXPECT_NEAR(at.front(), 80, 0.1) << x[0];
    const double width = std::stod(svg.substr(svg.find("<rect x='80' y='46' width='") + 27));
    EXPECT_NEAR(at.back(), 80 + width, 0.1) << x[0];
  }
  EXPECT_NE(drawn({500, 1000}, false).find(">600<"), std::string::npos);
  EXPECT_NE(drawn({500, 1000}, false).find(">1000<"), std::string::npos);
  EXPECT_NE(drawn({20, 5000}, false).find(">50<"), std::string::npos);
  EXPECT_EQ(drawn({3, 3}, false).find("nan"), std::string::npos);
}

TEST(Svg, NamesAndNotesStayInsideThePage) {
  const std::string svg = svg_page(
      "h", std::string(40, 'w') + " " + std::string(60, 'x') + " " + std::string(70, 'z'),
      {{.title = "t", .x_label = "x", .y_label = "y", .series = {{"codec 50x, shared expert", {8}, {1}}}}}, {});
  const size_t name = svg.find(">codec 50x");
  const double x = std::stod(svg.substr(svg.rfind("<text x='", name) + 9));
  EXPECT_LT(x + 24 * 7, 820);  // 7 pixels a character
  EXPECT_EQ(svg.find("x z"), std::string::npos);
  EXPECT_NE(svg.find(">" + std::string(70, 'z') + "<"), std::string::npos);
}

TEST(Svg, FewBarsAreNotWide) {
  const BarChart chart = {.title = "t", .y_label = "ms", .categories = {"only"}, .series = {"x"}, .values = {{1}}};
  const std::string svg = svg_page("h", "", {}, {chart});
  const size_t bar = svg.rfind("<rect x='", svg.find("<title>"));
  EXPECT_LE(std::stod(svg.substr(svg.find("width='", bar) + 7)), 46);
}

TEST(Svg, ChartsWithoutPointsAreStillPages) {
  const std::string svg = svg_page("empty", "", {LineChart{}}, {BarChart{}});
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
}

// Ten algorithms' names wrote over one another.
TEST(Svg, NamesOfBarsThatWouldTouchAreSlanted) {
  const auto drawn = [](size_t n) {
    BarChart chart = {.title = "t", .y_label = "ms", .categories = {}, .series = {"x"}, .values = {{}}};
    for (size_t c = 0; c < n; c++) {
      chart.categories.push_back("auto (hier:" + std::to_string(c) + ")");
      chart.values[0].push_back(1);
    }
    return svg_page("h", "", {}, {chart});
  };
  EXPECT_EQ(occurrences(drawn(3), "rotate(-25 "), 0u);
  EXPECT_EQ(occurrences(drawn(10), "rotate(-25 "), 10u);
}

// There are seven colours.
TEST(Svg, AnEighthSeriesDoesNotLookLikeTheFirst) {
  LineChart chart = {.title = "t", .x_label = "x", .y_label = "y", .series = {}};
  for (int i = 0; i < 9; i++) chart.series.push_back({"s" + std::to_string(i), {8, 64}, {1, 2}});
  const std::string svg = svg_page("h", "", {chart}, {});
  EXPECT_EQ(occurrences(svg, "stroke-dasharray"), 2u);
  EXPECT_EQ(occurrences(svg, "r='2.6' fill='white'"), 4u);
}

TEST(Svg, DrawsABarForEachValue) {
  const BarChart chart = {.title = "t",
                          .y_label = "ms",
                          .categories = {"flat", "hier:2"},
                          .series = {"x", "y"},
                          .values = {{1, 2}, {3, 4}}};
  EXPECT_EQ(occurrences(svg_page("h", "n", {}, {chart}), ", flat:"), 2u);
}

TEST(Svg, WritesSizesAndNumbersForPeople) {
  EXPECT_EQ(size_text(8), "8");
  EXPECT_EQ(size_text(65536), "64K");
  EXPECT_EQ(size_text(33554432), "32M");
  EXPECT_EQ(number_text(0.25), "0.25");
  EXPECT_EQ(number_text(1200), "1200");
}

TEST(Svg, ValuesThatDifferInTheirLastBitHaveOneTickBetweenThem) {
  const double y = 12.345678901234567;
  const LineChart chart = {
      .title = "t", .x_label = "x", .y_label = "y", .series = {{"a", {8, 64}, {y, std::nextafter(y, 13)}}}};
  const std::string svg = svg_page("h", "", {chart}, {});
  EXPECT_EQ(occurrences(svg, "<circle"), 2u);
  EXPECT_LT(svg.size(), 20000u);
}

TEST(Svg, ALegendOfManySeriesEndsWithItsChart) {
  LineChart chart = {.title = "t", .x_label = "x", .y_label = "y", .series = {}};
  for (int i = 0; i < 144; i++) chart.series.push_back({"series " + std::to_string(i), {8, 64}, {1, 2}});
  const std::string svg = svg_page("h", "", {chart, chart}, {});
  EXPECT_EQ(occurrences(svg, ">series 14<"), 2u);
  EXPECT_EQ(occurrences(svg, ">series 15<"), 0u);
  EXPECT_EQ(occurrences(svg, ">and 129 more<"), 2u);
}

}  // namespace
}  // namespace perf
