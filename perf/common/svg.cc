// SPDX-License-Identifier: Apache-2.0
#include "perf/common/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "perf/common/text.h"

namespace perf {
namespace {

constexpr double kWidth = 820, kHeight = 380;          // of one chart
constexpr double kLeft = 80, kTop = 46, kBottom = 56;  // around the plotting area
constexpr double kPlotHeight = kHeight - kTop - kBottom;
constexpr size_t kMostNames = 16;  // in a legend, which ends where the chart does
constexpr double kHeading = 44, kNoteLine = 16;
constexpr double kMostBarWidth = 46;
constexpr size_t kNoteCharacters = 115;  // per line of the note: 6.4 pixels each at size 12
// Okabe and Ito's palette, which colour-blind readers can tell apart.
constexpr std::array kColours = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"};

// The paint of the i-th series: filled, and hollow once all colours have been used.
std::string paint(size_t i) {
  const std::string colour = kColours[i % kColours.size()];
  return i < kColours.size() ? "fill='" + colour + "'" : "fill='white' stroke='" + colour + "'";
}
std::string stroke(size_t i) {
  constexpr const char* kDashes[] = {"", " stroke-dasharray='7 3'", " stroke-dasharray='2 3'"};
  return std::string("stroke='") + kColours[i % kColours.size()] + "'" + kDashes[i / kColours.size() % 3];
}

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

// The layout that all charts of a page share: there is room on the right for the longest name of the legends.
struct Layout {
  double plot_width = 0;

  Layout(const std::vector<LineChart>& lines, const std::vector<BarChart>& bars) {
    size_t longest = 0;
    for (const LineChart& chart : lines)
      for (const Series& series : chart.series) longest = std::max(longest, series.name.size());
    for (const BarChart& chart : bars)
      for (const std::string& name : chart.series) longest = std::max(longest, name.size());
    plot_width = kWidth - kLeft - std::min(44 + 7.4 * static_cast<double>(longest), 330.0);
  }
};

struct TextStyle {
  const char* anchor = "start";
  int size = 13;
  bool bold = false;
  int turned = 0;  // degrees, clockwise
};

void text(std::ostream& out, double x, double y, const std::string& content, const TextStyle& style = {}) {
  out << "<text x='" << x << "' y='" << y << "' font-size='" << style.size << "' text-anchor='" << style.anchor << "'";
  if (style.bold) out << " font-weight='bold'";
  if (style.turned != 0) out << " transform='rotate(" << style.turned << ' ' << x << ' ' << y << ")'";
  out << '>' << escape(content) << "</text>\n";
}

void line(std::ostream& out, double x1, double y1, double x2, double y2, const char* stroke) {
  out << "<line x1='" << x1 << "' y1='" << y1 << "' x2='" << x2 << "' y2='" << y2 << "' stroke='" << stroke << "'/>\n";
}

void frame(std::ostream& out, const Layout& layout, const std::string& title, const std::string& x_label,
           const std::string& y_label) {
  text(out, kLeft, 26, title, {.size = 15, .bold = true});
  text(out, kLeft + layout.plot_width / 2, kHeight - 14, x_label, {.anchor = "middle"});
  text(out, 20, kTop + kPlotHeight / 2, y_label, {.anchor = "middle", .turned = -90});
  out << "<rect x='" << kLeft << "' y='" << kTop << "' width='" << layout.plot_width << "' height='" << kPlotHeight
      << "' fill='none' stroke='#444'/>\n";
}

void legend(std::ostream& out, const Layout& layout, const std::vector<std::string>& names) {
  const double x = kLeft + layout.plot_width + 14;
  for (size_t i = 0; i < names.size(); i++) {
    const double y = kTop + 14 + 20 * static_cast<double>(i);
    if (i + 1 == kMostNames && names.size() > kMostNames) {
      text(out, x, y, "and " + std::to_string(names.size() - i) + " more");
      return;
    }
    out << "<rect x='" << x << "' y='" << y - 9 << "' width='14' height='10' " << paint(i) << "/>\n";
    text(out, x + 20, y, names[i]);
  }
}

// Returns 1, 2 or 5 times a power of ten, so that there are at most about six ticks over `length`.
double nice_step(double length) {
  const double raw = length / 5, power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (raw <= factor * power) return factor * power;
  return 10 * power;
}

// Begins and ends at a tick, as close to the data as ticks allow. Ticks are powers of two for bytes, even steps for
// values within a factor of ten, and 1, 2 and 5 times powers of ten for others (only powers and both ends where these
// are many).
struct Axis {
  double low = 1, high = 10;
  bool logarithmic = true;
  std::vector<double> ticks;

  Axis(const LineChart& chart, bool is_x) {
    double smallest = HUGE_VAL, largest = 0;
    for (const Series& s : chart.series)
      for (size_t i = 0; i < s.x.size(); i++) {
        if (!(s.x[i] > 0 && s.y[i] > 0)) continue;
        smallest = std::min(smallest, is_x ? s.x[i] : s.y[i]);
        largest = std::max(largest, is_x ? s.x[i] : s.y[i]);
      }
    if (largest == 0) smallest = 1, largest = 100;
    if (is_x && chart.x_is_bytes)
      powers_of_two(smallest, largest);
    else if (largest <= 10 * smallest)
      even_steps(smallest, largest);
    else
      decades(smallest, largest);
    low = ticks.front();
    high = ticks.back();
    if (!(is_x && chart.x_is_bytes) && ticks.size() > 9)
      std::erase_if(ticks, [&](double t) { return !power_of_ten(t) && t != low && t != high; });
  }
  double at(double value) const {
    return logarithmic ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
  }

 private:
  static bool power_of_ten(double value) {
    const double exponent = std::log10(value);
    return std::fabs(exponent - std::round(exponent)) < 1e-6;
  }
  void powers_of_two(double smallest, double largest) {
    const int first = static_cast<int>(std::floor(std::log2(smallest) + 1e-9));
    const int last = std::max(first + 1, static_cast<int>(std::ceil(std::log2(largest) - 1e-9)));
    const int step = std::max(1, (last - first + 11) / 12);
    for (int power = first; power < last + step; power += step) ticks.push_back(std::exp2(power));
  }
  void even_steps(double smallest, double largest) {
    logarithmic = false;
    // Ticks that differ by less than this are one number, and counting them would not end.
    const bool differ = largest - smallest > 1e-9 * largest;
    const double step = nice_step(differ ? largest - smallest : smallest);
    const double first = std::floor(smallest / step + 1e-9);
    const double last = std::max(first + 1, std::ceil(largest / step - 1e-9));
    for (double n = first; n <= last; n += 1) ticks.push_back(n * step);
  }
  void decades(double smallest, double largest) {
    double decade = std::pow(10, std::floor(std::log10(smallest) + 1e-9));
    for (; ticks.empty() || ticks.back() < largest * (1 - 1e-9); decade *= 10)
      for (const double factor : {1.0, 2.0, 5.0}) {
        const double tick = factor * decade;
        if (tick <= smallest * (1 + 1e-9))
          ticks.assign(1, tick);
        else if (ticks.empty() || ticks.back() < largest * (1 - 1e-9))
          ticks.push_back(tick);
      }
  }
};

void draw_grid(std::ostream& out, const Layout& layout, const Axis& x, const Axis& y, bool x_is_bytes) {
  for (const double value : x.ticks) {
    const double at = kLeft + layout.plot_width * x.at(value);
    line(out, at, kTop, at, kTop + kPlotHeight, "#ddd");
    text(out, at, kTop + kPlotHeight + 16, x_is_bytes ? size_text(value) : number_text(value),
         {.anchor = "middle", .size = 12});
  }
  for (const double value : y.ticks) {
    const double at = kTop + kPlotHeight * (1 - y.at(value));
    line(out, kLeft, at, kLeft + layout.plot_width, at, "#ddd");
    text(out, kLeft - 6, at + 4, number_text(value), {.anchor = "end", .size = 12});
  }
}

void draw(std::ostream& out, const Layout& layout, const LineChart& chart) {
  const Axis x(chart, true), y(chart, false);
  draw_grid(out, layout, x, y, chart.x_is_bytes);
  frame(out, layout, chart.title, chart.x_label, chart.y_label);
  std::vector<std::string> names;
  for (size_t s = 0; s < chart.series.size(); s++) {
    const Series& series = chart.series[s];
    std::ostringstream points, dots;
    for (size_t i = 0; i < series.x.size(); i++) {
      if (!(series.x[i] > 0 && series.y[i] > 0)) continue;
      const double px = kLeft + layout.plot_width * x.at(series.x[i]),
                   py = kTop + kPlotHeight * (1 - y.at(series.y[i]));
      points << px << ',' << py << ' ';
      dots << "<circle cx='" << px << "' cy='" << py << "' r='2.6' " << paint(s) << "><title>"
           << (chart.x_is_bytes ? size_text(series.x[i]) : number_text(series.x[i])) << ": " << number_text(series.y[i])
           << "</title></circle>\n";
    }
    if (series.joined)
      out << "<polyline points='" << points.str() << "' fill='none' " << stroke(s) << " stroke-width='1.8'/>\n";
    out << dots.str();
    names.push_back(series.name);
  }
  legend(out, layout, names);
}

void draw(std::ostream& out, const Layout& layout, const BarChart& chart) {
  double largest = 0;
  for (const auto& row : chart.values)
    for (const double v : row) largest = std::max(largest, v);
  if (largest <= 0) largest = 1;
  const double step = nice_step(largest), top = std::ceil(largest / step) * step;
  for (double tick = 0; tick <= top * 1.0001; tick += step) {
    const double at = kTop + kPlotHeight * (1 - tick / top);
    line(out, kLeft, at, kLeft + layout.plot_width, at, "#ddd");
    text(out, kLeft - 6, at + 4, number_text(tick), {.anchor = "end", .size = 12});
  }
  const double n_series = static_cast<double>(std::max<size_t>(1, chart.series.size()));
  const double group = layout.plot_width / static_cast<double>(std::max<size_t>(1, chart.categories.size()));
  const double bar = std::min(group * 0.8 / n_series, kMostBarWidth);
  size_t longest = 0;
  for (const std::string& name : chart.categories) longest = std::max(longest, name.size());
  // Names that would touch are slanted.
  const TextStyle name_style = 7.4 * static_cast<double>(longest + 1) <= group
                                   ? TextStyle{.anchor = "middle"}
                                   : TextStyle{.anchor = "end", .size = 11, .turned = -25};
  for (size_t c = 0; c < chart.categories.size(); c++) {
    const double middle = kLeft + group * (static_cast<double>(c) + 0.5), left = middle - bar * n_series / 2;
    for (size_t s = 0; s < chart.series.size(); s++) {
      const double value = chart.values[s][c], height = kPlotHeight * value / top;
      out << "<rect x='" << left + bar * static_cast<double>(s) << "' y='" << kTop + kPlotHeight - height << "' width='"
          << bar * 0.94 << "' height='" << height << "' " << paint(s) << "><title>"
          << escape(chart.series[s] + ", " + chart.categories[c]) << ": " << number_text(value) << "</title></rect>\n";
    }
    text(out, middle, kTop + kPlotHeight + 17, chart.categories[c], name_style);
  }
  frame(out, layout, chart.title, "", chart.y_label);
  legend(out, layout, chart.series);
}

// Breaks a note into lines that fit between the margins.
std::vector<std::string> note_lines(const std::string& note) {
  std::istringstream words(note);
  std::vector<std::string> lines(1);
  for (std::string word; words >> word;) {
    if (!lines.back().empty() && lines.back().size() + word.size() >= kNoteCharacters) lines.emplace_back();
    lines.back() += (lines.back().empty() ? "" : " ") + word;
  }
  return lines;
}

}  // namespace

std::string svg_page(const std::string& heading, const std::string& note, const std::vector<LineChart>& lines,
                     const std::vector<BarChart>& bars) {
  const double charts = static_cast<double>(lines.size() + bars.size());
  const std::vector<std::string> small_print = note_lines(note);
  const double notes = kHeading + charts * kHeight + 14;
  const double height = notes + kNoteLine * static_cast<double>(small_print.size());
  const Layout layout(lines, bars);
  std::ostringstream out;
  out << "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 " << kWidth << ' ' << height << "' width='" << kWidth
      << "' height='" << height
      << "' font-family='sans-serif' fill='#222'>\n<rect width='100%' height='100%' fill='white'/>\n";
  text(out, kLeft, 28, heading, {.size = 18, .bold = true});
  double y = kHeading;
  const auto place = [&](const auto& chart) {
    out << "<g transform='translate(0 " << y << ")'>\n";
    draw(out, layout, chart);
    out << "</g>\n";
    y += kHeight;
  };
  for (const LineChart& chart : lines) place(chart);
  for (const BarChart& chart : bars) place(chart);
  for (size_t i = 0; i < small_print.size(); i++)
    text(out, kLeft, notes + kNoteLine * static_cast<double>(i), small_print[i], {.size = 12});
  out << "</svg>\n";
  return out.str();
}

}  // namespace perf
