// SPDX-License-Identifier: Apache-2.0
#include "topology/svg.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "topology/assign.h"
#include "topology/text.h"

namespace moeccl::topology {

namespace {

constexpr double kLeafWidth = 190, kLeafHeight = 54, kGap = 12, kTitle = 24;
constexpr double kRowWidth = 4 * (kLeafWidth + kGap) + 6 * kGap;

struct Box {
  double x = 0, y = 0, width = kLeafWidth, height = kLeafHeight;
  std::vector<size_t> children;
};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        // Names come from drivers and files, so characters that XML forbids are replaced.
        out += static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e ? '?' : c;
    }
  }
  return out;
}

const char* colour(NodeKind kind) {
  constexpr const char* kColours[] = {"#f7f7f7", "#e8eef7", "#f1f6ee", "#fdf3d8", "#efefef",
                                      "#e4e4e4", "#d9c7ef", "#a8d5a2", "#a3c8e8"};
  return kColours[static_cast<size_t>(kind)];
}

std::string second_line(const Node& node) {
  switch (node.kind) {
    case NodeKind::kGpu:
      return node.name + (node.memory_bytes > 0 ? format(" {}", bytes_text(node.memory_bytes)) : "");
    case NodeKind::kNic: {
      const double rate = nic_bytes_per_ns(node);
      std::string text = node.ports.empty() ? "" : node.ports[0].interface;
      if (rate > 0) text += format("{}{:g} Gbit/s", text.empty() ? "" : " ", rate * 8);
      if (!nic_usable(node)) text += " down";
      return text;
    }
    default:
      return node.memory_bytes > 0 ? bytes_text(node.memory_bytes) : "";
  }
}

class Picture {
 public:
  explicit Picture(const Graph& graph) : graph_(graph), boxes_(graph.nodes.size()) {
    std::map<std::string_view, size_t> place;
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      place[graph.nodes[i].id] = i;
      if (i > 0) boxes_[place[graph.nodes[i].parent]].children.push_back(i);
    }
    place_of_ = std::move(place);
    for (size_t i = boxes_.size(); i-- > 0;)  // children come after their parents
      if (!leaf(i)) std::tie(boxes_[i].width, boxes_[i].height) = flow(boxes_[i]);
  }
  double width() const { return boxes_[0].width; }
  double height() const { return boxes_[0].height; }

  std::string draw(double x, double y, const std::string& title) {
    boxes_[0].x = x;
    boxes_[0].y = y;
    std::string text;
    for (size_t i = 0; i < boxes_.size(); ++i) {
      if (!leaf(i)) (void)flow(boxes_[i]);
      text += box(i, i == 0 ? title : "");
    }
    for (const Link& link : graph_.links) {
      if (switched(link) || link.kind == LinkKind::kPeer)
        continue;  // shown in the GPU's box: a machine may have a hundred of them
      const char* style = link.kind == LinkKind::kNvlink ? "stroke=\"#4a8f3c\" stroke-width=\"2\""
                                                         : "stroke=\"#888888\" stroke-width=\"1\"";
      text += line(link.a, link.b, style, link_name(link.kind) + std::string(" ") + rate_text(link.cost.bytes_per_ns));
    }
    const NicAssignment a = assign_nics(graph_);
    for (size_t i = 0; i < a.choices.size(); ++i) {
      if (holds(a.users[i]->id, a.nics[a.choices[i].nics[0]]->id)) continue;  // its box is in the user's box
      text += line(a.users[i]->id, a.nics[a.choices[i].nics[0]]->id,
                   "stroke=\"#2a6fb0\" stroke-width=\"1.5\" stroke-dasharray=\"5 4\"",
                   label(*a.users[i]) + " uses " + label(*a.nics[a.choices[i].nics[0]]));
    }
    return text;
  }

 private:
  bool leaf(size_t i) const { return boxes_[i].children.empty(); }
  bool holds(const std::string& container, const std::string& id) const {
    const Node& node = graph_.nodes[place_of_.at(id)];
    return id == container || (!node.parent.empty() && holds(container, node.parent));
  }
  bool is_switch(const std::string& id) const { return graph_.nodes[place_of_.at(id)].kind == NodeKind::kNvSwitch; }
  bool switched(const Link& link) const {
    return link.kind == LinkKind::kNvlink && (is_switch(link.a) || is_switch(link.b));
  }
  // Returns "NVSwitch 450 GB/s" for a GPU's links to switches.
  std::string switched_text(const std::string& id) const {
    double rate = 0;
    bool any = false;
    for (const Link& link : graph_.links) {
      if ((link.a != id && link.b != id) || !switched(link)) continue;
      any = true;
      rate += link.cost.bytes_per_ns;
    }
    return !any ? "" : rate > 0 ? "NVSwitch " + rate_text(rate) : "NVSwitch";
  }

  // Arranges children in rows, leaves before containers. Sets the children's places from the box's own, and returns the
  // space that they take.
  std::pair<double, double> flow(const Box& box) {
    const double limit = &box == &boxes_[0] ? 2 * kRowWidth + 8 * kGap : kRowWidth;
    double x = kGap, y = kTitle + kGap / 2, row_height = 0, wide = 0;
    const auto put = [&](Box& child) {
      if (x > kGap && x + child.width > limit) {
        y += row_height + kGap;
        x = kGap;
        row_height = 0;
      }
      child.x = box.x + x;
      child.y = box.y + y;
      x += child.width + kGap;
      row_height = std::max(row_height, child.height);
      wide = std::max(wide, x);
    };
    for (const size_t child : box.children)
      if (leaf(child)) put(boxes_[child]);
    const bool mixed = x > kGap;
    if (mixed && std::any_of(box.children.begin(), box.children.end(), [&](size_t c) { return !leaf(c); })) {
      y += row_height + kGap;
      x = kGap;
      row_height = 0;
    }
    for (const size_t child : box.children)
      if (!leaf(child)) put(boxes_[child]);
    return {wide, y + row_height + kGap};
  }

  std::string box(size_t i, const std::string& title) const {
    const Box& b = boxes_[i];
    const Node& node = graph_.nodes[i];
    std::string first = title.empty() ? label(node) : title;
    if (!leaf(i) && !second_line(node).empty()) first += ", " + second_line(node);
    std::string text = format(
        "<rect x=\"{:.0f}\" y=\"{:.0f}\" width=\"{:.0f}\" height=\"{:.0f}\" rx=\"4\" fill=\"{}\" "
        "stroke=\"#555555\"><title>{}</title></rect>\n",
        b.x, b.y, b.width, b.height, colour(node.kind), escaped(node.id));
    text += format("<text x=\"{:.0f}\" y=\"{:.0f}\">{}</text>\n", b.x + 8, b.y + 16, escaped(first));
    if (leaf(i) && node.kind == NodeKind::kGpu)
      text += format("<text x=\"{:.0f}\" y=\"{:.0f}\" class=\"small\">{}</text>\n", b.x + 8, b.y + 48,
                     escaped(switched_text(node.id)));
    if (leaf(i))
      text += format("<text x=\"{:.0f}\" y=\"{:.0f}\" class=\"small\">{}</text>\n", b.x + 8, b.y + 33,
                     escaped(second_line(node).substr(0, 32)));
    return text;
  }

  std::string line(const std::string& from, const std::string& to, const std::string& style,
                   const std::string& title) const {
    const auto a = place_of_.find(from), b = place_of_.find(to);
    if (a == place_of_.end() || b == place_of_.end()) return "";
    const Box &p = boxes_[a->second], &q = boxes_[b->second];
    const double x1 = p.x + p.width / 2, y1 = p.y + p.height - 6, x2 = q.x + q.width / 2, y2 = q.y + q.height - 6;
    // The line is bent, so that lines along a row do not cover each other.
    const double bend = 20 + 0.06 * std::abs(x2 - x1);
    return format(
        "<path d=\"M{:.0f} {:.0f} Q{:.0f} {:.0f} {:.0f} {:.0f}\" fill=\"none\" opacity=\"0.75\" "
        "{}><title>{}</title></path>\n",
        x1, y1, (x1 + x2) / 2, (y1 + y2) / 2 + bend, x2, y2, style, escaped(title));
  }

  const Graph& graph_;
  std::vector<Box> boxes_;
  std::map<std::string_view, size_t> place_of_;
};

}  // namespace

std::string to_svg(std::span<const Graph> hosts) {
  std::string body;
  double wide = 0, y = kGap;
  for (size_t i = 0; i < hosts.size();) {
    const std::string page = to_text(hosts[i]);
    size_t n = 1;
    while (i + n < hosts.size() && to_text(hosts[i + n]) == page) ++n;
    Picture picture(hosts[i]);
    std::string title = "host " + hosts[i].nodes[0].name;
    if (n > 1) title = format("{} hosts such as {}", n, hosts[i].nodes[0].name);
    body += picture.draw(kGap, y, title);
    y += picture.height() + 3 * kGap;
    wide = std::max(wide, picture.width() + 2 * kGap);
    i += n;
  }
  return format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
             "{1:.0f}\">\n<style>text {{ font: 12px sans-serif; }} .small {{ font-size: 10px; fill: #333333; "
             "}}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
             wide, y) +
         body + "</svg>\n";
}

}  // namespace moeccl::topology
