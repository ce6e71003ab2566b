#include "perf/common/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace perf {
namespace {

constexpr double kWidth = 820, kHeight = 380;                        // of one chart
constexpr double kLeft = 80, kRight = 230, kTop = 46, kBottom = 56;  // around the plotting area
constexpr double kPlotWidth = kWidth - kLeft - kRight, kPlotHeight = kHeight - kTop - kBottom;
constexpr double kHeading = 44;
// Okabe and Ito's palette, which colour-blind readers can tell apart.
constexpr std::array kColours = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"};

const char* colour(size_t i) { return kColours[i % kColours.size()]; }

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else
      out += c;
  }
  return out;
}

struct TextStyle {
  const char* anchor = "start";
  int size = 12;
  bool bold = false;
  bool upright = true;  // false: rotated to read upwards
};

void text(std::ostream& out, double x, double y, const std::string& content, const TextStyle& style = {}) {
  out << "<text x='" << x << "' y='" << y << "' font-size='" << style.size << "' text-anchor='" << style.anchor << "'";
  if (style.bold) out << " font-weight='bold'";
  if (!style.upright) out << " transform='rotate(-90 " << x << ' ' << y << ")'";
  out << '>' << escape(content) << "</text>\n";
}

void line(std::ostream& out, double x1, double y1, double x2, double y2, const char* stroke) {
  out << "<line x1='" << x1 << "' y1='" << y1 << "' x2='" << x2 << "' y2='" << y2 << "' stroke='" << stroke << "'/>\n";
}

void frame(std::ostream& out, const std::string& title, const std::string& x_label, const std::string& y_label) {
  text(out, kLeft, 26, title, {.size = 15, .bold = true});
  text(out, kLeft + kPlotWidth / 2, kHeight - 12, x_label, {.anchor = "middle"});
  text(out, 20, kTop + kPlotHeight / 2, y_label, {.anchor = "middle", .upright = false});
  out << "<rect x='" << kLeft << "' y='" << kTop << "' width='" << kPlotWidth << "' height='" << kPlotHeight
      << "' fill='none' stroke='#444'/>\n";
}

void legend(std::ostream& out, const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); i++) {
    const double y = kTop + 14 + 20 * static_cast<double>(i), x = kLeft + kPlotWidth + 16;
    out << "<rect x='" << x << "' y='" << y - 9 << "' width='14' height='10' fill='" << colour(i) << "'/>\n";
    text(out, x + 20, y, names[i]);
  }
}

// A logarithmic axis: `base` to the powers low .. high.
struct LogAxis {
  double base = 10;
  int low = 0, high = 1;

  LogAxis(const LineChart& chart, bool is_x) : base(is_x && chart.x_is_bytes ? 2 : 10) {
    double smallest = HUGE_VAL, largest = 0;
    for (const Series& s : chart.series)
      for (size_t i = 0; i < s.x.size(); i++) {
        if (!(s.x[i] > 0 && s.y[i] > 0)) continue;
        smallest = std::min(smallest, is_x ? s.x[i] : s.y[i]);
        largest = std::max(largest, is_x ? s.x[i] : s.y[i]);
      }
    if (largest == 0) return;
    low = static_cast<int>(std::floor(std::log(smallest) / std::log(base) + 1e-9));
    high = std::max(low + 1, static_cast<int>(std::ceil(std::log(largest) / std::log(base) - 1e-9)));
  }
  double at(double value) const { return (std::log(value) / std::log(base) - low) / (high - low); }
  int step() const { return std::max(1, (high - low + 11) / 12); }
};

void draw_grid(std::ostream& out, const LogAxis& x, const LogAxis& y, bool x_is_bytes) {
  for (int power = x.low; power <= x.high; power += x.step()) {
    const double value = std::pow(x.base, power), at = kLeft + kPlotWidth * x.at(value);
    line(out, at, kTop, at, kTop + kPlotHeight, "#ddd");
    text(out, at, kTop + kPlotHeight + 16, x_is_bytes ? size_text(value) : number_text(value),
         {.anchor = "middle", .size = 11});
  }
  for (int power = y.low; power <= y.high; power += y.step()) {
    const double value = std::pow(y.base, power), at = kTop + kPlotHeight * (1 - y.at(value));
    line(out, kLeft, at, kLeft + kPlotWidth, at, "#ddd");
    text(out, kLeft - 6, at + 4, number_text(value), {.anchor = "end", .size = 11});
  }
}

void draw(std::ostream& out, const LineChart& chart) {
  const LogAxis x(chart, true), y(chart, false);
  draw_grid(out, x, y, chart.x_is_bytes);
  frame(out, chart.title, chart.x_label, chart.y_label);
  std::vector<std::string> names;
  for (size_t s = 0; s < chart.series.size(); s++) {
    const Series& series = chart.series[s];
    std::ostringstream points, dots;
    for (size_t i = 0; i < series.x.size(); i++) {
      if (!(series.x[i] > 0 && series.y[i] > 0)) continue;
      const double px = kLeft + kPlotWidth * x.at(series.x[i]), py = kTop + kPlotHeight * (1 - y.at(series.y[i]));
      points << px << ',' << py << ' ';
      dots << "<circle cx='" << px << "' cy='" << py << "' r='2.6' fill='" << colour(s) << "'><title>"
           << (chart.x_is_bytes ? size_text(series.x[i]) : number_text(series.x[i])) << ": " << number_text(series.y[i])
           << "</title></circle>\n";
    }
    if (series.joined)
      out << "<polyline points='" << points.str() << "' fill='none' stroke='" << colour(s)
          << "' stroke-width='1.8'/>\n";
    out << dots.str();
    names.push_back(series.name);
  }
  legend(out, names);
}

// 1, 2 or 5 times a power of ten: at most about six ticks up to `largest`.
double nice_step(double largest) {
  const double raw = largest / 5, power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (raw <= factor * power) return factor * power;
  return 10 * power;
}

void draw(std::ostream& out, const BarChart& chart) {
  double largest = 0;
  for (const auto& row : chart.values)
    for (const double v : row) largest = std::max(largest, v);
  if (largest <= 0) largest = 1;
  const double step = nice_step(largest), top = std::ceil(largest / step) * step;
  for (double tick = 0; tick <= top * 1.0001; tick += step) {
    const double at = kTop + kPlotHeight * (1 - tick / top);
    line(out, kLeft, at, kLeft + kPlotWidth, at, "#ddd");
    text(out, kLeft - 6, at + 4, number_text(tick), {.anchor = "end", .size = 11});
  }
  const double group = kPlotWidth / static_cast<double>(std::max<size_t>(1, chart.categories.size()));
  const double bar = group * 0.8 / static_cast<double>(std::max<size_t>(1, chart.series.size()));
  for (size_t c = 0; c < chart.categories.size(); c++) {
    const double left = kLeft + group * (static_cast<double>(c) + 0.1);
    for (size_t s = 0; s < chart.series.size(); s++) {
      const double value = chart.values[s][c], height = kPlotHeight * value / top;
      out << "<rect x='" << left + bar * static_cast<double>(s) << "' y='" << kTop + kPlotHeight - height << "' width='"
          << bar * 0.94 << "' height='" << height << "' fill='" << colour(s) << "'><title>"
          << escape(chart.series[s] + ", " + chart.categories[c]) << ": " << number_text(value) << "</title></rect>\n";
    }
    text(out, left + group * 0.4, kTop + kPlotHeight + 16, chart.categories[c], {.anchor = "middle"});
  }
  frame(out, chart.title, "", chart.y_label);
  legend(out, chart.series);
}

}  // namespace

std::string number_text(double value) {
  char buffer[32];
  if (value != 0 && (std::fabs(value) >= 1e6 || std::fabs(value) < 1e-3))
    std::snprintf(buffer, sizeof buffer, "%.3g", value);
  else if (std::fabs(value) >= 100)
    std::snprintf(buffer, sizeof buffer, "%.0f", value);
  else
    std::snprintf(buffer, sizeof buffer, "%.3g", value);
  return buffer;
}

std::string size_text(double bytes) {
  const char* units[] = {"", "K", "M", "G", "T"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(units)) {
    bytes /= 1024;
    unit++;
  }
  return number_text(bytes) + units[unit];
}

std::string svg_page(const std::string& heading, const std::string& note, const std::vector<LineChart>& lines,
                     const std::vector<BarChart>& bars) {
  const double charts = static_cast<double>(lines.size() + bars.size());
  const double height = kHeading + charts * kHeight + 24;
  std::ostringstream out;
  out << "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 " << kWidth << ' ' << height << "' width='" << kWidth
      << "' height='" << height
      << "' font-family='sans-serif' fill='#222'>\n<rect width='100%' height='100%' fill='white'/>\n";
  text(out, kLeft, 28, heading, {.size = 18, .bold = true});
  double y = kHeading;
  const auto place = [&](const auto& chart) {
    out << "<g transform='translate(0 " << y << ")'>\n";
    draw(out, chart);
    out << "</g>\n";
    y += kHeight;
  };
  for (const LineChart& chart : lines) place(chart);
  for (const BarChart& chart : bars) place(chart);
  text(out, kLeft, height - 10, note, {.size = 11});
  out << "</svg>\n";
  return out.str();
}

bool write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  return static_cast<bool>(file);
}

}  // namespace perf
