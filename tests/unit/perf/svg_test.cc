#include "perf/common/svg.h"

#include <gtest/gtest.h>

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

TEST(Svg, ChartsWithoutPointsAreStillPages) {
  const std::string svg = svg_page("empty", "", {LineChart{}}, {BarChart{}});
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
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

}  // namespace
}  // namespace perf
