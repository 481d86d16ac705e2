declare const htm: {
  bind<H extends (...given: any[]) => any>(
    h: H,
  ): (strings: TemplateStringsArray, ...values: unknown[]) => ReturnType<H>;
};
export default htm;
